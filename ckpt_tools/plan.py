"""What a cast will do, decided from headers alone: pure functions from a checkpoint to jobs, one per output shard."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpt_tools import families
from ckpt_tools.checkpoint import SHARD_NAME, Checkpoint
from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.header import BITS, Header, Tensor, element_count, header_bytes
from ckpt_tools.index import INDEX_NAME, Index, index_of
from ckpt_tools.quantization import block_of, quantization_problems, without_quantization
from ckpt_tools.report import Report
from ckpt_tools.verify import check_model, check_quantization


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's bytes lie: file name, and byte positions counted from the start of that file."""

    file: str
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor from source to output: copied bit for bit, or dequantised when `scale` is given."""

    name: str
    source: Span
    scale: Span | None
    begin: int
    """Position in the output file."""


@dataclass(frozen=True, slots=True)
class ShardJob:
    """Everything a worker needs to write one output shard."""

    source: str
    target: str
    file: str
    header: bytes
    moves: tuple[Move, ...]
    block: tuple[int, int]
    size: int
    """Bytes of the finished output file."""
    stamp: str
    """Changes when the job or the source files it reads change: what a finished shard was made from."""

    @property
    def read_bytes(self) -> int:
        return sum(move.source.nbytes for move in self.moves)


@dataclass(frozen=True, slots=True)
class CastPlan:
    """All jobs, the index and config to write, and what is left out and why (tensor -> reason)."""

    source: Path
    target: Path
    jobs: tuple[ShardJob, ...]
    index: dict
    config: dict
    dropped: dict[str, str]
    added: tuple[str, ...]

    @property
    def stamp(self) -> str:
        digest = hashlib.sha256("".join(job.stamp for job in self.jobs).encode())
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        return digest.hexdigest()[:32]

    @property
    def size(self) -> int:
        return sum(job.size for job in self.jobs)


def choose_tensors(checkpoint: Checkpoint, mtp: str, keep_buffers: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Decide which tensors go over and which do not.

    The index is only believed where a shard confirms it. A key that no shard holds is dropped when it is a buffer the
    model computes itself, or an MTP tensor that is dropped anyway; anything else means a lost tensor.

    Returns:
        kept: tensor -> file that holds it; dropped: tensor -> reason.

    Raises:
        Fault: a shard is broken or missing, a tensor is held by no shard or by two.
    """
    locations = checkpoint.locations()
    listed = checkpoint.index.weight_map if checkpoint.index else {}
    kept, dropped, lost = {}, {}, {}
    for name in {**listed, **locations}:
        held = locations.get(name)
        if mtp == "drop" and families.is_mtp(name, checkpoint.config):
            dropped[name] = "MTP layer" if held else "MTP layer, held by no shard"
        elif families.STALE_BUFFER.search(name) and not (keep_buffers and held):
            dropped[name] = "buffer the model computes itself" + ("" if held else ", held by no shard")
        elif not held:
            lost[name] = listed[name]
        elif len(held) > 1:
            raise Fault(f"{name}: lies in {' and '.join(held)}; remove the shard of the older save")
        else:
            kept[name] = held[0]
    for fault in checkpoint.broken.values():
        gone = [name for name, file in listed.items() if file == fault.path.name]
        if not gone or any(name not in dropped for name in gone):
            raise fault
    if lost:
        name, file = next(iter(lost.items()))
        there = "held by no shard" if file in checkpoint.headers else "a file that is not there"
        advice = "copy the missing files again"
        if all(families.is_mtp(name, checkpoint.config) for name in lost):
            advice = "all of it is the MTP layer: `--mtp drop` casts without it"
        raise Fault(
            f"{checkpoint.path}: {len(lost)} tensors of the index are lost, first {name} in {file}, {there}; {advice}"
        )
    if not checkpoint.index:
        _check_numbering(checkpoint)
    return kept, dropped


def _check_numbering(checkpoint: Checkpoint) -> None:
    """Without an index the file names alone tell how many shards there should be."""
    counts = {int(match["count"][:9]) for file in checkpoint.headers if (match := SHARD_NAME.fullmatch(file))}
    if counts and counts != {len(checkpoint.headers)}:
        raise Fault(f"{checkpoint.path}: {len(checkpoint.headers)} shards, numbered 'of {max(counts)}'; copy the rest")


def output_names(sources: list[str], all_survive: bool) -> dict[str, str]:
    """Name the output shards: as before when none vanished, else numbered again without gaps."""
    if all_survive:
        return {file: file for file in sources}
    count = len(sources)
    if count == 1:
        return {sources[0]: "model.safetensors"}
    return {file: f"model-{number:05d}-of-{count:05d}.safetensors" for number, file in enumerate(sources, 1)}


def output_dtype(tensor: Tensor) -> str:
    return "BF16" if tensor.dtype == "F8_E4M3" else tensor.dtype


def output_layout(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Place tensors one after the other, wider dtypes first so that each starts on a multiple of its width."""
    ordered = sorted(tensors, key=lambda tensor: (-BITS[output_dtype(tensor)], tensor.begin))
    placed, position = [], 0
    for tensor in ordered:
        dtype = output_dtype(tensor)
        end = position + (element_count(tensor.shape) * 2 if dtype != tensor.dtype else tensor.nbytes)
        placed.append(Tensor(tensor.name, dtype, tensor.shape, position, end))
        position = end
    return placed


def span_of(header: Header, tensor: Tensor) -> Span:
    start = header.data_start
    return Span(header.path.name, start + tensor.begin, start + tensor.end, tensor.dtype, tensor.shape)


def job_stamp(header: bytes, moves: tuple[Move, ...], block: tuple[int, int], source: Path) -> str:
    """Digest of what the shard is made from: the moves, and size and time of every source file they read."""
    files = sorted({span.file for move in moves for span in (move.source, move.scale) if span})
    stats = [(file, (source / file).stat().st_size, (source / file).stat().st_mtime_ns) for file in files]
    content = json.dumps([stats, block, [asdict(move) for move in moves]])
    return hashlib.sha256(header + content.encode()).hexdigest()[:32]


def plan_cast(checkpoint: Checkpoint, target: Path, mtp: str = "keep", keep_buffers: bool = False) -> CastPlan:
    """Plan the cast of a checkpoint to BF16. Reads nothing but what the checkpoint's headers said.

    Raises:
        UsageFault: `mtp` is neither "keep" nor "drop".
        Fault: a scale is missing, orphaned or misshaped, another 1-byte dtype is there, a tensor is lost, or the
            output would not verify.
    """
    if mtp not in ("keep", "drop"):
        raise UsageFault(f"mtp is {mtp!r}; say 'keep' or 'drop'")
    kept, dropped = choose_tensors(checkpoint, mtp, keep_buffers)
    tensors = {name: checkpoint.headers[file].tensors[name] for name, file in kept.items()}
    quantised = any(tensor.dtype == "F8_E4M3" for tensor in tensors.values())
    block = block_of(checkpoint.config) if quantised else (1, 1)
    problems = list(quantization_problems(tensors, block)) if quantised else []
    if problems:
        _, name, problem = problems[0]
        more = f" (and {len(problems) - 1} more; `ckpt verify` lists all)" if len(problems) > 1 else ""
        raise Fault(f"{name}: {problem}{more}; restore {kept[name]} from the model's origin, nothing was written")

    by_file: dict[str, list[Tensor]] = {}
    for name, file in kept.items():
        if not (quantised and name.endswith(families.SCALE_SUFFIX)):
            by_file.setdefault(file, []).append(tensors[name])
    if not by_file:
        raise Fault(f"{checkpoint.path}: no tensor is left to write; is this the right folder?")
    listed = set(checkpoint.index.files()) if checkpoint.index else set()
    names = output_names(sorted(by_file), set(by_file) == set(checkpoint.headers) | set(checkpoint.broken) | listed)
    jobs, headers = [], []
    for file, members in sorted(by_file.items()):
        job, header = _plan_shard(checkpoint, target, names[file], file, members, kept, block)
        jobs.append(job)
        headers.append(header)

    config = without_quantization(checkpoint.config) if quantised else dict(checkpoint.config)
    if mtp == "drop" and "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    old = dict(checkpoint.index.metadata) if checkpoint.index else {}
    if "total_parameters" in old:
        old["total_parameters"] = sum(element_count(t.shape) for header in headers for t in header.tensors.values())
    added = tuple(name for name in kept if checkpoint.index and name not in checkpoint.index.weight_map)
    plan = CastPlan(checkpoint.path, target, tuple(jobs), index_of(headers, old), config, dropped, added)
    _check_outcome(plan, headers)
    return plan


def _plan_shard(
    checkpoint: Checkpoint,
    target: Path,
    name: str,
    file: str,
    members: list[Tensor],
    kept: dict[str, str],
    block: tuple[int, int],
) -> tuple[ShardJob, Header]:
    """Plan the output shard `name` from these tensors of the source's `file`; also returns the header it will have."""
    source_header = checkpoint.headers[file]
    layout = output_layout(members)
    text = header_bytes(layout, {**(source_header.metadata or {}), "format": "pt"})
    moves = []
    for placed in layout:
        span, scale = span_of(source_header, source_header.tensors[placed.name]), None
        if span.dtype == "F8_E4M3":
            scale_header = checkpoint.headers[kept[placed.name + families.SCALE_SUFFIX]]
            scale = span_of(scale_header, scale_header.tensors[placed.name + families.SCALE_SUFFIX])
        moves.append(Move(placed.name, span, scale, len(text) + placed.begin))
    size = len(text) + (layout[-1].end if layout else 0)
    stamp = job_stamp(text, tuple(moves), block, checkpoint.path)
    job = ShardJob(str(checkpoint.path), str(target), name, text, tuple(moves), block, size, stamp)
    header = Header(target / name, len(text) - 8, size, {"format": "pt"}, {tensor.name: tensor for tensor in layout})
    return job, header


def _check_outcome(plan: CastPlan, headers: list[Header]) -> None:
    """Verify the checkpoint that would be written, before the first byte of it is."""
    index = Index(plan.target / INDEX_NAME, plan.index["weight_map"], plan.index["metadata"])
    outcome = Checkpoint(plan.target, index, {header.path.name: header for header in headers}, {}, plan.config)
    report = Report(str(plan.source))
    check_model(outcome, report)
    check_quantization(outcome, report)
    if report.errors:
        more = f" (and {len(report.errors) - 1} more)" if len(report.errors) > 1 else ""
        first = report.errors[0]
        raise Fault(f"{plan.source}: {first.where}: {first.problem}{more}; {first.remedy}; nothing was written")
