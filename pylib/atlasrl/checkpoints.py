"""Checkpoints of a run: complete or not, which one to load, which ones to remove. Imports neither torch nor verl.

    checkpoints/global_step_N/actor/…    written by verl
    checkpoints/global_step_N/data.pt    position in the prompts
    checkpoints/global_step_N/COMPLETE   written by us, last: every file with its size

A folder without a COMPLETE manifest that agrees with the files is not a checkpoint. verl's tracker file
(`latest_checkpointed_iteration.txt`) is kept up to date for verl's own tools, but never believed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atlasrl.errors import Fault
from atlasrl.rundir import RunDir, write_atomically

MANIFEST = "COMPLETE"
TRACKER = "latest_checkpointed_iteration.txt"
FOLDER = re.compile(r"global_step_(\d+)")
REMOVED = ".removing-"
HEADROOM = 1.2


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    manifest: dict

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(self.manifest["files"].values())


@dataclass(frozen=True)
class Remains:
    """A checkpoint folder that must not be loaded, and why."""

    path: Path
    step: int
    problem: str


def folder(run: RunDir, step: int) -> Path:
    return run.checkpoints / f"global_step_{step}"


# -- reading ----------------------------------------------------------------------------------------


def complete(run: RunDir) -> list[Checkpoint]:
    """Every checkpoint whose files are all there with the sizes of its manifest, newest first."""
    return [found for found in survey(run) if isinstance(found, Checkpoint)]


def survey(run: RunDir) -> list[Checkpoint | Remains]:
    """Every `global_step_N` folder, newest first, verified."""
    if not run.checkpoints.is_dir():
        return []
    numbered = [(int(m[1]), path) for path in run.checkpoints.iterdir() if (m := FOLDER.fullmatch(path.name))]
    return [verify(path) for _, path in sorted(numbered, reverse=True)]


def verify(path: Path) -> Checkpoint | Remains:
    """Compare a folder with its manifest: presence and size of every file; no file is read."""
    match = FOLDER.fullmatch(path.name)
    step = int(match[1]) if match else -1
    if match is None:
        return Remains(path, step, "is not named global_step_N")
    if path.is_symlink() or not path.is_dir():
        return Remains(path, step, "is a link" if path.is_symlink() else "does not exist")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {str(name): int(size) for name, size in manifest["files"].items()}
    except FileNotFoundError:
        return Remains(path, step, f"half-written: it has no {MANIFEST} manifest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Remains(path, step, f"its {MANIFEST} manifest is damaged")
    if manifest.get("step") != step:
        return Remains(path, step, f"its manifest is that of step {manifest.get('step')}")
    for name, size in files.items():
        file = path / name
        if file.is_symlink() or ".." in Path(name).parts or not file.is_file():
            return Remains(path, step, f"{name} is missing")
        if file.stat().st_size != size:
            return Remains(path, step, f"{name} has {file.stat().st_size} bytes instead of {size}")
    return Checkpoint(path, step, manifest)


def choose(run: RunDir, step: int | None = None) -> Checkpoint:
    """The newest complete checkpoint, or the one of `step`.

    Raises:
        Fault: there is none; the message lists what exists and why it cannot be loaded.
    """
    found = survey(run)
    usable = [checkpoint for checkpoint in found if isinstance(checkpoint, Checkpoint)]
    wanted = [checkpoint for checkpoint in usable if step in (None, checkpoint.step)]
    if wanted:
        return wanted[0]
    what = f"run {run.name} has no complete checkpoint" + (f" of step {step}" if step is not None else "")
    advice = (
        f"complete: {', '.join(str(c.step) for c in usable)}; choose one with --step"
        if usable
        else f"nothing to resume from; to start it at step 0: bin/resume {run.name} --step 0"
    )
    raise Fault(f"{what} in {run.checkpoints}: {'; '.join(explain(run)) or 'the folder is empty'}; {advice}")


def explain(run: RunDir) -> list[str]:
    """What is there and what verl's tracker says about it, one short sentence each."""
    found = survey(run)
    lines = [
        f"step {c.step} is complete ({c.size} bytes)" if isinstance(c, Checkpoint) else f"{c.path.name}: {c.problem}"
        for c in found
    ]
    tracker = run.checkpoints / TRACKER
    if not tracker.is_file():
        return lines
    text = tracker.read_text(errors="replace").strip()
    newest = next((c.step for c in found if isinstance(c, Checkpoint)), None)
    if not text:
        lines.append("verl's tracker is empty (a crash while it was written)")
    elif not text.isdigit():
        lines.append(f"verl's tracker is damaged: {text[:40]!r}")
    elif all(c.step != int(text) for c in found):
        lines.append(f"verl's tracker points to step {text}, which does not exist")
    elif newest is not None and int(text) != newest:
        lines.append(f"verl's tracker says step {text}, the newest complete checkpoint is step {newest}")
    return lines


# -- writing ----------------------------------------------------------------------------------------


def check_room(run: RunDir, estimate: int = 0) -> None:
    """Refuse to begin a save that will not fit: 1.2 × the last checkpoint, or × `estimate` bytes before the first.

    Raises:
        Fault: with both numbers and what to do.
    """
    last = next(iter(complete(run)), None)
    need = int(HEADROOM * (last.size if last else estimate))
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(run.checkpoints).free
    if free < need:
        measured = (
            f"1.2 × the {last.size} bytes of step {last.step}" if last else "1.2 × the estimated first checkpoint"
        )
        raise Fault(
            f"the next checkpoint needs {need} bytes ({measured}), {run.checkpoints} has {free} free: "
            "free space or lower checkpoint.keep; nothing was written and the last complete checkpoint is intact"
        )


def begin(run: RunDir, step: int) -> Path:
    """An empty place for the checkpoint of `step`; what an earlier attempt left there is removed."""
    path = folder(run, step)
    if path.exists() or path.is_symlink():
        _remove(path)
    return path


def seal(path: Path, *, required: Iterable[str] = (), **facts) -> Checkpoint:
    """Flush every file of a finished checkpoint to disk and write its manifest, last.

    Args:
        path: the `global_step_N` folder.
        required: files that must be there, relative to `path`.
        facts: what a resume must know: step, world_size, backend, layout, prompts …

    Raises:
        Fault: a required file is missing.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    names = {file.relative_to(path).as_posix() for file in files} - {MANIFEST}
    missing = sorted(set(required) - names)
    if missing:
        raise Fault(
            f"{path} lacks {missing[0]} ({len(missing)} file(s) in all) although all workers reported a finished save: "
            "is the run directory on storage that all nodes share?"
        )
    for file in files:
        _flush(file)
    for inner in (*sorted(p for p in path.rglob("*") if p.is_dir()), path):
        _flush(inner)
    manifest = {
        "step": int(FOLDER.fullmatch(path.name)[1]),
        **facts,
        "time": round(time.time(), 3),
        "files": {name: (path / name).stat().st_size for name in sorted(names)},
    }
    write_atomically(path / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    _flush(path)
    _flush(path.parent)
    return Checkpoint(path, manifest["step"], manifest)


def point_tracker(run: RunDir, step: int) -> None:
    """Tell verl's own tools which checkpoint is the newest; whole or not at all."""
    write_atomically(run.checkpoints / TRACKER, str(step))


def set_aside(run: RunDir, step: int) -> list[Path]:
    """Rename checkpoints newer than `step`, from which a resume begins: they belong to a course that is given up.

    Otherwise they would be taken for the newest, and the new ones pruned as older. Nothing is removed.
    """
    aside = []
    for entry in survey(run):
        if entry.step > step and not entry.path.is_symlink():
            target = entry.path.with_name(f"superseded_{entry.path.name}_{time.time_ns()}")
            entry.path.rename(target)
            aside.append(target)
    return aside


def prune(run: RunDir, keep: int) -> list[Path]:
    """Remove complete checkpoints beyond the `keep` newest, and half-written ones older than the newest complete.

    The newest complete checkpoint always stays. Links are never followed and never removed.

    Returns:
        The folders that were removed.
    """
    if run.checkpoints.is_symlink():
        return []
    for leftover in run.checkpoints.glob(f"{REMOVED}*"):
        if not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
    found = [entry for entry in survey(run) if not entry.path.is_symlink() and entry.path.is_dir()]
    usable = [entry for entry in found if isinstance(entry, Checkpoint)]
    if not usable:
        return []
    doomed = usable[max(1, keep) :]
    doomed += [entry for entry in found if isinstance(entry, Remains) and entry.step < usable[0].step]
    for entry in doomed:
        _remove(entry.path)
    return [entry.path for entry in doomed]


def check_world(checkpoint: Checkpoint, *, backend: str, world_size: int) -> None:
    """Refuse a checkpoint that these workers cannot read.

    Raises:
        Fault: other backend, or FSDP2 files of another number of workers.
    """
    was = checkpoint.manifest
    if was.get("backend") != backend:
        raise Fault(
            f"{checkpoint.path} was written by backend {was.get('backend')}, this run uses {backend}: start a new run "
            "from its exported model"
        )
    if backend == "fsdp2" and was.get("world_size") != world_size:
        raise Fault(
            f"{checkpoint.path} holds the shards of {was.get('world_size')} workers, this run has {world_size}: FSDP2 "
            f"checkpoints load only on the same number; resume with nodes × devices = {was.get('world_size')}"
        )


def _remove(path: Path) -> None:
    """Rename first: a crash half-way leaves nothing that looks like a checkpoint."""
    if path.is_symlink():
        raise Fault(f"{path} is a link; it is left alone: move it away")
    aside = path.with_name(f"{REMOVED}{path.name}-{os.getpid()}")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
