"""Dump the stack of a run's model over answers that the run recorded, on one device and through transformers.

The GPU team does the same with its own checkpoint and device; only small dumps travel.
"""

from __future__ import annotations

import json
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import RunDir


def dump_run(
    run: RunDir,
    folder: Path,
    *,
    step: int,
    rows: int,
    model: str | None,
    device: str,
    dtype: str | None,
    tool: str,
    **bounds,
) -> Path:
    """Dump one forward and backward pass.

    Args:
        step, rows: the recorded step, and how many of its answers.
        model: Hugging Face folder; None takes the one that the run started from.
        dtype: None takes the recipe's compute_dtype.
        tool: atlasrl or msprobe.
        bounds: `limit` and `sample` of the recorder.

    Returns:
        The folder that `dumps.read` takes.

    Raises:
        Fault: nothing recorded, or the model cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from atlasrl.precision import msprobe, stack

    plan = _plan(run)
    dtype = dtype or plan["recipe"]["model"]["compute_dtype"]
    place = model or plan["model"]
    try:
        loaded = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, dtype), attn_implementation="eager")
    except (OSError, ValueError) as problem:
        raise Fault(f"{place} cannot be loaded: {' '.join(str(problem).split())[:200]}; give --model FOLDER") from None
    loaded = loaded.to(device).train()
    inputs = stack.Rows(*(tensor.to(device) for tensor in recorded(run, step, rows)))
    if tool == "msprobe":
        with msprobe.watch(loaded, folder):
            stack.train_step(loaded, inputs)
        return msprobe.result(folder)
    recorder = stack.Recorder(folder, step=step, device=device, dtype=dtype, model=str(place), **bounds)
    stack.record_step(loaded, inputs, recorder)
    return recorder.close()


def recorded(run: RunDir, step: int, rows: int):
    """The first `rows` recorded answers of a step, as `stack.Rows`."""
    import torch

    from atlasrl.precision import rollouts, stack

    tensors = rollouts.read(rollouts.folder_of(run.path), step).generations[0].tensors
    mask = tensors["attention_mask"][:rows]
    answer = mask.clone()
    answer[:, : tensors["prompts"].shape[1]] = 0
    ids = torch.cat([tensors["prompts"], tensors["responses"]], 1)[:rows]
    return stack.Rows(ids, mask, answer)


def _plan(run: RunDir) -> dict:
    try:
        return json.loads(run.plan.read_text())
    except (OSError, ValueError):
        raise UsageFault(f"{run.path} is no run: it has no plan.json") from None
