"""Cases of test_upstream_faults.py that need a process of their own. Importing this applies none of our fixes."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_assets import untrained_model
from verl.utils.tracking import Tracking


def run(output: Path, case: Callable[[], None]) -> None:
    """Run `case` in this process, a new one; what it and native code print goes to the file `output`."""
    sys.stdout = sys.stderr = file = output.open("w", buffering=1)
    os.dup2(file.fileno(), 1)  # native code aborts past Python's streams
    os.dup2(file.fileno(), 2)
    try:
        case()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def log_and_die(folder: Path, first: int, last: int, *, numpy: bool, without: str) -> None:
    """Log the steps first … last-1 as verl's fit does, then die of kill -9."""
    os.environ.update(
        ATLASRL_WITHOUT_FIX=without,
        ATLASRL_FIRST_STEP=str(first),
        TENSORBOARD_DIR=str(folder / "tb"),
        VERL_FILE_LOGGER_PATH=str(folder / f"metrics-{first}.jsonl"),
    )
    import atlasrl.trainer.plugin  # noqa: F401

    logger = Tracking("p", "e", ["tensorboard", "file"])
    for step in range(first, last):
        data = {"a/b": np.float64(step)}
        logger.log({**data, "a/c": np.float32(step)} if numpy else data, step)
    os.kill(os.getpid(), signal.SIGKILL)


def expert_gradients(folder: Path, rank: int, *, fixed: bool) -> None:
    """Gradients of two FSDP2 workers with different rows against one process with all rows; prints the worst gap."""
    if fixed:
        import atlasrl.trainer.plugin  # noqa: F401
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    tokens = torch.arange(4, 16).view(4, 3)  # rows 2r and 2r+1 belong to worker r

    def backward(model, rows):
        model(input_ids=rows, use_cache=False).logits.log_softmax(-1)[..., 5].sum().backward()

    reference = untrained_model(experts=16)
    backward(reference, tokens)
    model = untrained_model(experts=16)
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    backward(model, tokens[2 * rank : 2 * rank + 2])
    worst = 0.0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        whole = ours.grad.full_tensor() * 2  # FSDP averages over the workers
        expected = theirs.grad if theirs.grad is not None else torch.zeros_like(theirs)
        worst = max(worst, float((whole - expected).abs().max()))
    print(f"worst {worst}", flush=True)
