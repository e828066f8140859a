"""Variables that make the same seeds give the same numbers, for recipes with `deterministic: true`.

They must be set before the processes start: HCCL, cuBLAS and Python read them once. `settle()` adds what only torch can
be told, in each process that loads verl, and `prove()` asks all of them before the first step. Determinism costs speed,
and gives equal numbers only for equal devices, splits and versions.

Sources: verl docs/ascend_tutorial/ascend_consistency.rst; CANN's list of environment variables; MindSpeed
`extend_seed_all`, which sets the same but is called only by Megatron's own training loop, never by verl; PyTorch's
notes on randomness.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

from atlasrl.errors import Fault

Device = Literal["npu", "cuda", "cpu"]

EVERYWHERE = {
    "PYTHONHASHSEED": ("0", "the order of sets and of dictionaries' keys is the same in every process"),
}
ASCEND = {
    "CLOSE_MATMUL_K_SHIFT": ("1", "matmul does not shift its reduction axis between cores"),
    "ATB_MATMUL_SHUFFLE_K_ENABLE": ("0", "the same for ATB's matmul"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "the engine runs in the worker, so requests are scheduled in one order"),
}
HCCL = {
    "HCCL_DETERMINISTIC": ("true", "all-reduce and reduce-scatter add in a fixed order"),
}
LCCL = {
    "LCCL_DETERMINISTIC": ("1", "collectives on the vector cores add in a fixed order"),
    "ATB_LLM_LCOC_ENABLE": ("0", "no fusion of matmul and collective, whose order depends on timing"),
}
CUDA = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", "cuBLAS picks its workspace, and so its algorithm, the same each time"),
    "NCCL_ALGO": ("Ring", "the order of additions does not depend on a choice made at start"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": ("0", "the engine runs in the worker, so requests are scheduled in one order"),
}
CPU = {
    "OMP_NUM_THREADS": ("1", "sums are not split among threads"),
    "MKL_CBWR": ("COMPATIBLE", "MKL does not choose its kernels by processor"),
}


def environment(device: Device, expansion_mode: str | None = None) -> dict[str, tuple[str, str]]:
    """Name -> (value, reason) of every variable of a deterministic run.

    Args:
        device: the recipe's device.
        expansion_mode: HCCL_OP_EXPANSION_MODE of the run; `AIV` means LCCL's collectives, anything else HCCL's own.
    """
    if device == "cuda":
        return EVERYWHERE | CUDA
    if device == "cpu":
        return EVERYWHERE | CPU
    return EVERYWHERE | ASCEND | (LCCL if expansion_mode == "AIV" else HCCL)


def missing(device: Device) -> list[str]:
    """What this process lacks to be deterministic, one line each; empty: proven. For each worker to report."""
    import torch

    wanted = environment(device, os.environ.get("HCCL_OP_EXPANSION_MODE"))
    lines = [
        f"{name} is {os.environ.get(name, 'not set')} and must be {value}"
        for name, (value, _) in wanted.items()
        if os.environ.get(name) != value
    ]
    if sys.flags.hash_randomization and os.environ.get("PYTHONHASHSEED") == "0":
        lines.append("PYTHONHASHSEED was set after Python had started")
    if not torch.are_deterministic_algorithms_enabled():
        lines.append("torch.use_deterministic_algorithms is off in this process")
    return lines


def settle() -> None:
    """Tell torch, in each worker and before its first operator.

    `warn_only`, since vLLM's sampler uses cumsum, which has no deterministic kernel on every device and would raise
    (verl leaves the whole call out for that reason); with warnings the rest is deterministic.
    """
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def prove(device: Device, actors: dict) -> None:
    """Ask this process and each Ray actor whether it is deterministic.

    Args:
        device: the recipe's device.
        actors: name -> handle.

    Raises:
        Fault: names the processes that are not, and what the first of them lacks.
    """
    import ray

    asked = [actor.__ray_call__.remote(_missing_there, device) for actor in actors.values()]
    answers = {"trainer": missing(device), **dict(zip(actors, ray.get(asked), strict=True))}
    if guilty := {name: lines for name, lines in answers.items() if lines}:
        name, lines = next(iter(guilty.items()))
        raise Fault(
            f"deterministic: {len(guilty)} of {len(answers)} processes are not ({', '.join(guilty)}); {name}: "
            f"{'; '.join(lines)}. A variable of the recipe or the site may replace one of these, or the process was "
            "started by other hands"
        )


def _missing_there(_actor, device: Device) -> list[str]:
    return missing(device)
