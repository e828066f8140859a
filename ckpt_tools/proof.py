"""Recompute a sample of a finished cast by an independent, slow path and compare it bit for bit.

Independent means: other code reads the files (the safetensors library), other code does the arithmetic (torch).
"""

from __future__ import annotations

import random
from pathlib import Path

from ckpt_tools.errors import Fault
from ckpt_tools.plan import CastPlan, Move

SAMPLE_TENSORS = 64
SAMPLE_BYTES = 32 << 20
"""FP8 bytes to recompute at most; a smaller checkpoint is recomputed whole."""


def reference_dequantise(weight, scale, block: tuple[int, int]):
    """DeepSeek's formula in plain torch: y[i, j] = float32(x[i, j]) * s[i // rows, j // columns], as bfloat16.

    Args:
        weight: float8_e4m3fn [rows, columns]. scale: [begun row blocks, begun column blocks].
    """
    import torch

    rows, columns = weight.shape
    wide = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * wide).to(torch.bfloat16)


def spot_check(plan: CastPlan) -> int:
    """Recompute a sample of tensors from the source.

    Returns:
        how many tensors were compared.

    Raises:
        Fault: a tensor of the target has other bits than the reference gives.
    """
    import torch
    from safetensors import safe_open

    where = {move.name: job.file for job in plan.jobs for move in job.moves}
    block = plan.jobs[0].block if plan.jobs else (1, 1)
    chosen = _sample([move for job in plan.jobs for move in job.moves], plan.stamp)
    for move in chosen:
        with safe_open(plan.source / move.source.file, "pt") as file:
            expected = file.get_tensor(move.name)
        if move.scale is not None:
            with safe_open(plan.source / move.scale.file, "pt") as file:
                expected = reference_dequantise(expected, file.get_tensor(f"{move.name}_scale_inv"), block)
        with safe_open(plan.target / where[move.name], "pt") as file:
            found = file.get_tensor(move.name)
        same = found.dtype == expected.dtype and found.shape == expected.shape
        if not (same and torch.equal(_bits(found), _bits(expected))):
            raise Fault(
                f"{Path(plan.target) / where[move.name]}: {move.name} is not what the reference formula gives; "
                "do not use it: remove the target, cast again, and report this"
            )
    return len(chosen)


def _bits(tensor):
    """The tensor's bytes, so that NaN equals NaN and -0 differs from 0; all NaN patterns of a BF16 count as one."""
    import torch

    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16 and tensor.isnan().any():
        tensor = tensor.clone()
        tensor[tensor.isnan()] = float("nan")
    return tensor.reshape(-1).view(torch.uint8)


def _sample(moves: list[Move], seed: str) -> list[Move]:
    """Everything when it is little; else a random part, mostly cast tensors, limited by bytes."""
    generator = random.Random(seed)
    shuffled = generator.sample(moves, len(moves))
    shuffled.sort(key=lambda move: move.scale is None)
    budget, chosen = SAMPLE_BYTES, []
    whole = sum(move.source.nbytes for move in moves) <= SAMPLE_BYTES
    copies = [move for move in shuffled if move.scale is None][: SAMPLE_TENSORS // 4]
    for move in shuffled if whole else [*copies, *shuffled[:SAMPLE_TENSORS]]:
        if move.source.nbytes <= budget or not chosen:
            chosen.append(move)
            budget -= move.source.nbytes
    return chosen
