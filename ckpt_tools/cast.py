"""Cast a block-quantised FP8 checkpoint to BF16: plan, check, act, prove.

Everything is decided from headers before a byte is written; each shard is one job that any process or node may do;
config.json and the index come last, so that an unfinished target is no checkpoint anyone could load.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.checksum import write_checksums
from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.files import (
    STATE_FOLDER,
    check_room,
    copy_file,
    exclusive,
    human,
    remove_parts,
    write_atomically,
    write_json,
)
from ckpt_tools.header import parse_json
from ckpt_tools.index import INDEX_NAME, index_text
from ckpt_tools.plan import CastPlan, ShardJob, plan_cast
from ckpt_tools.proof import spot_check
from ckpt_tools.shard import finish_shard, read_record
from ckpt_tools.spread import run_here, run_processes, run_ray
from ckpt_tools.verify import verify

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")
OURS = ("config.json", INDEX_NAME)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""


@dataclass(frozen=True, slots=True)
class CastResult:
    """What a cast did. `already` is true when the target was complete and unchanged, and nothing was written."""

    target: Path
    shards: int
    written: int
    proven: int
    cast_tensors: int
    copied_tensors: int
    dropped: dict[str, str]
    side_files: tuple[str, ...]
    left_files: tuple[str, ...]
    checked: int
    already: bool
    foreign_files: tuple[str, ...] = ()
    """Side files of a complete target that are not, or no longer, those of the source."""

    def as_dict(self) -> dict:
        return {key: getattr(self, key) for key in self.__slots__} | {"target": str(self.target)}


def cast(
    source: Path | str,
    target: Path | str,
    workers: int = 1,
    ray_address: str | None = None,
    mtp: str = "keep",
    keep_buffers: bool = False,
    progress: Progress | None = None,
    read_again: bool = False,
) -> CastResult:
    """Cast `source` into the folder `target`; continue there when an earlier cast was interrupted.

    Args:
        workers: processes on this machine.
        ray_address: spread over the Ray cluster there instead ("auto": RAY_ADDRESS, else the local one).
        mtp: "keep" the multi-token-prediction layer, or "drop" it from shards, index and config together.
        keep_buffers: keep stored rotary_emb.inv_freq and the like instead of dropping them.
        progress: called with (bytes done, bytes in total).
        read_again: prove a complete target by reading all of it, even when no file changed since it was proven.

    Raises:
        UsageFault: no such source; the target holds something that is not this cast's.
        Fault: the source cannot be cast as it is (nothing was written then), or the result is not right.

    Example:
        >>> cast("DeepSeek-V3", "DeepSeek-V3-BF16", workers=2, mtp="drop").shards  # doctest: +SKIP
        163
    """
    source, target = Path(source).absolute(), Path(target).absolute()
    plan = plan_cast(read_checkpoint(source), target, mtp, keep_buffers)
    claim_target(plan)
    with exclusive(target):
        if not read_again and (done := _finished(plan)):
            return done
        results = _write_shards(plan, workers, ray_address, progress)
        return _conclude(plan, results)


def state_file(target: Path) -> Path:
    return target / STATE_FOLDER / "cast.json"


def _read_state(target: Path) -> dict:
    try:
        state, _ = parse_json(state_file(target).read_bytes(), "cast.json")
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def claim_target(plan: CastPlan) -> None:
    """Make the target folder ours, or recognise it as ours.

    Raises:
        UsageFault: it is the source or lies inside it, or holds foreign files, or a cast of another source.
    """
    target, source = plan.target, plan.source
    if target.resolve() == source.resolve() or source.resolve() in target.resolve().parents:
        raise UsageFault(f"{target}: the target lies in the source folder; give a folder beside it")
    if target.exists() and not target.is_dir():
        raise UsageFault(f"{target}: is a file; give a folder")
    present = sorted(path.name for path in target.iterdir() if path.name != STATE_FOLDER) if target.is_dir() else []
    owner = _read_state(target).get("source")
    if owner is None and present:
        raise UsageFault(f"{target}: holds {present[0]} and was not begun by a cast; give an empty folder")
    if owner not in (None, str(source)):
        raise UsageFault(f"{target}: holds a cast of {owner}; give another folder")
    remaining = sum(job.size for job in plan.jobs if not (target / job.file).exists())
    (target / STATE_FOLDER / "cast").mkdir(parents=True, exist_ok=True)
    check_room(target, remaining)
    if owner is None:
        write_json(state_file(target), {"source": str(source), "complete": False})


def _finished(plan: CastPlan) -> CastResult | None:
    """The earlier result, when the target is complete and no file has changed since it was proven."""
    state = _read_state(plan.target)
    if not state.get("complete") or state.get("stamp") != plan.stamp:
        return None
    for job in plan.jobs:
        path, record = plan.target / job.file, read_record(plan.target, job.file)
        if not path.is_file() or (path.stat().st_size, path.stat().st_mtime_ns) != (job.size, record.get("mtime_ns")):
            return None
    if verify(plan.target).errors:
        return None
    side_files = tuple(state.get("side_files", ()))
    foreign = tuple(file for file in side_files if not _same_file(plan.source / file, plan.target / file))
    result = _result(plan, [], side_files, tuple(state.get("left_files", ())), 0, already=True)
    return replace(result, foreign_files=foreign)


def _same_file(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _write_shards(plan: CastPlan, workers: int, ray_address: str | None, progress: Progress | None) -> list[dict]:
    """Run all jobs, largest first so that no straggler is left at the end; report bytes as shards finish."""
    state = _read_state(plan.target)
    write_json(state_file(plan.target), {**state, "source": str(plan.source), "complete": False})
    (plan.target / "config.json").unlink(missing_ok=True)
    (plan.target / INDEX_NAME).unlink(missing_ok=True)
    remove_parts(plan.target)
    jobs = sorted(plan.jobs, key=lambda job: -job.size)
    if ray_address is not None:
        results = run_ray(finish_shard, jobs, None if ray_address == "auto" else ray_address)
    elif workers > 1 and len(jobs) > 1:
        results = run_processes(finish_shard, jobs, workers)
    else:
        results = run_here(finish_shard, jobs)
    records, done = [], 0
    sizes = {job.file: job.size for job in jobs}
    for record in results:
        records.append(record)
        done += sizes[record["file"]]
        if progress:
            progress(done, plan.size)
    _remove_strangers(plan)
    return records


def _remove_strangers(plan: CastPlan) -> None:
    """Remove shards that an earlier cast of ours wrote under other options (they have our note, and no job now)."""
    wanted = {job.file for job in plan.jobs}
    for note in (plan.target / STATE_FOLDER / "cast").glob("*.json"):
        file = note.name.removesuffix(".json")
        if file not in wanted:
            (plan.target / file).unlink(missing_ok=True)
            note.unlink()


def _conclude(plan: CastPlan, records: list[dict]) -> CastResult:
    """Copy side files, write config and index from what was written, verify, recompute a sample, note completion."""
    target = plan.target
    copied, left = copy_side_files(plan.source, target)
    write_checksums(target, {name: value for record in records for name, value in record["tensors"].items()})
    if plan.config:
        write_json(target / "config.json", plan.config)
    write_atomically(target / INDEX_NAME, index_text(plan.index))
    report = verify(target)
    if report.errors:
        raise Fault(f"{target}: the result does not verify: {report.errors[0]}")
    checked = spot_check(plan)
    result = _result(plan, records, copied, left, checked, already=False)
    state = {"source": str(plan.source), "complete": True, "stamp": plan.stamp, "dropped": plan.dropped}
    write_json(state_file(target), {**state, "side_files": list(copied), "left_files": list(left)})
    return result


def _result(plan, records, side_files, left_files, checked, already) -> CastResult:
    proven = sum(1 for record in records if record.get("proven"))
    moves = [move for job in plan.jobs for move in job.moves]
    cast_tensors = sum(1 for move in moves if move.scale)
    return CastResult(
        target=plan.target,
        shards=len(plan.jobs),
        written=len(records) - proven,
        proven=proven,
        cast_tensors=cast_tensors,
        copied_tensors=len(moves) - cast_tensors,
        dropped=plan.dropped,
        side_files=side_files,
        left_files=left_files,
        checked=checked,
        already=already,
    )


def copy_side_files(source: Path, target: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy tokenizer, code and the like; skip weights of other formats, hidden files and linked folders.

    Returns:
        relative paths of the files copied, and of those left behind.
    """
    copied, left = [], []
    for folder, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            path = Path(folder) / file
            relative = path.relative_to(source)
            if file.endswith(".safetensors") or str(relative) in OURS or file.endswith(".safetensors.index.json"):
                continue
            if file.startswith(".") or file.endswith(WEIGHT_SUFFIXES) or not path.is_file():
                left.append(str(relative))
                continue
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, target / relative)
            copied.append(str(relative))
    return tuple(copied), tuple(left)


def describe(result: CastResult) -> list[str]:
    """The result in lines for a person."""
    if result.already:
        lines = [f"{result.target}: weights complete and unchanged since they were proven; nothing to do"]
        return lines + [f"not the source's {file}: edited here, or of another model" for file in result.foreign_files]
    size = human(sum(shard.stat().st_size for shard in result.target.glob("*.safetensors")))
    lines = [
        f"{result.target}: {result.shards} shards, {size}; {result.written} written, {result.proven} proven again",
        f"{result.cast_tensors} tensors cast to BF16, {result.copied_tensors} copied bit for bit, "
        f"{result.checked} recomputed by the reference formula and equal",
        f"side files copied: {', '.join(result.side_files) or 'none'}",
    ]
    if result.left_files:
        lines.append(f"left behind: {', '.join(result.left_files)}")
    reasons: dict[str, list[str]] = {}
    for name, reason in result.dropped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        lines.append(f"dropped {len(names)} ({reason}): {names[0]}" + (" …" if len(names) > 1 else ""))
    return lines


def plan_lines(plan: CastPlan) -> list[str]:
    """The plan in lines for a person: what `--dry-run` prints."""
    jobs: tuple[ShardJob, ...] = plan.jobs
    cast_tensors = sum(1 for job in jobs for move in job.moves if move.scale)
    copied = sum(len(job.moves) for job in jobs) - cast_tensors
    lines = [
        f"{plan.source} -> {plan.target}",
        f"{len(jobs)} shards, {human(sum(job.read_bytes for job in jobs))} read, {human(plan.size)} written",
        f"{cast_tensors} tensors cast to BF16, {copied} copied bit for bit",
    ]
    for name, reason in plan.dropped.items():
        lines.append(f"dropped {name}: {reason}")
    for name in plan.added:
        lines.append(f"added {name}: the source's index does not list it")
    return lines
