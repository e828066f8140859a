"""Saving and loading around verl's own checkpoint code: room first, manifest last, nothing taken on trust."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from atlasrl import checkpoints
from atlasrl.errors import Fault
from atlasrl.recipe import Recipe
from atlasrl.rundir import RunDir

ADAM_BYTES_PER_BF16_BYTE = 6
"""float32 weights and both Adam moments (12 bytes) per parameter of a BF16 file (2 bytes)."""

LEFT_FREE = 1 << 20
"""Less free space than this after a failed save means that the disk is full."""


def save(run: RunDir, recipe: Recipe, *, step: int, world_size: int, prompts: dict, write: Callable[[], None]) -> None:
    """Make the checkpoint of `step` with `write` (verl's save), prove it, point to it, prune older ones.

    Raises:
        Fault: no room, disk full, or a worker's file is missing. The last complete checkpoint stays.
    """
    began = time.perf_counter()
    checkpoints.check_room(run, ADAM_BYTES_PER_BF16_BYTE * folder_size(run.model))
    path = checkpoints.begin(run, step)
    try:
        write()
        saved = checkpoints.seal(
            path,
            required=required_files(recipe.backend, world_size),
            backend=recipe.backend,
            world_size=world_size,
            layout=recipe.parallel.model_dump(),
            prompts=prompts,
        )
    except Exception as problem:
        _explain_full_disk(run, path, step, problem)
        raise
    checkpoints.point_tracker(run, step)
    removed = checkpoints.prune(run, recipe.checkpoint.keep)
    run.record(
        "checkpoint",
        step=step,
        path=str(path),
        bytes=saved.size,
        seconds=round(time.perf_counter() - began, 3),
        removed=[gone.name for gone in removed],
    )


def required_files(backend: str, world_size: int) -> list[str]:
    """Files without which a checkpoint cannot be loaded, relative to its folder."""
    if backend == "megatron":
        optimizer = [f"actor/dist_ckpt/{name}" for name in (".metadata", "metadata.json", "common.pt")]
        return [
            "data.pt",
            *optimizer,
            "actor/huggingface/config.json",
            "actor/huggingface/model.safetensors.index.json",
        ]
    shards = [
        f"actor/{part}_world_size_{world_size}_rank_{rank}.pt"
        for part in ("model", "optim", "extra_state")
        for rank in range(world_size)
    ]
    return ["data.pt", *shards]


def check_start(run: RunDir, recipe: Recipe, resume_from: Path | None, world_size: int) -> int:
    """The step to continue after: 0, or that of `resume_from`.

    Raises:
        Fault: the checkpoint is not complete or not readable here; or a fresh start would bury existing checkpoints.
    """
    if resume_from is None:
        if existing := checkpoints.complete(run):
            raise Fault(
                f"run {run.name} has a complete checkpoint of step {existing[0].step} and this attempt was not told to "
                "resume: resume the run, or start a new one under another name"
            )
        return 0
    found = checkpoints.verify(resume_from)
    if isinstance(found, checkpoints.Remains):
        raise Fault(f"cannot resume from {resume_from}: {found.problem}; {'; '.join(checkpoints.explain(run))}")
    checkpoints.check_world(found, backend=recipe.backend, world_size=world_size)
    for path in checkpoints.set_aside(run, found.step):
        print(f"warning: {path.name} is newer than the resumed step {found.step}; set aside, not removed", flush=True)
    return found.step


def folder_size(path: Path) -> int:
    """Bytes of the regular files below `path`."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0


def _explain_full_disk(run: RunDir, path: Path, step: int, problem: Exception) -> None:
    """Turn "no space left" in any of its disguises into a Fault; give the space back."""
    free = shutil.disk_usage(run.checkpoints).free
    text = str(problem)
    full = (isinstance(problem, OSError) and problem.errno in {errno.ENOSPC, errno.EDQUOT}) or any(
        sign in text for sign in ("No space left", "Disk quota exceeded", "PytorchStreamWriter failed writing")
    )
    if not full and free > LEFT_FREE:
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    newest = next((f"step {c.step}" for c in checkpoints.complete(run)), "none")
    raise Fault(
        f"the disk filled up while the checkpoint of step {step} was written to {run.checkpoints} ({free} bytes were "
        f"left); the half-written folder is removed, the newest complete checkpoint is {newest}: free space and resume"
    ) from problem
