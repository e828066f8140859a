"""Compare two checkpoints tensor by tensor, streaming, and report the differences only."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ckpt_tools.checkpoint import Checkpoint, read_checkpoint
from ckpt_tools.checksum import PIECE, Checksum, range_checksum
from ckpt_tools.errors import Fault
from ckpt_tools.families import is_tied
from ckpt_tools.shard import read_scales
from ckpt_tools.views import View, decode, read_rows, row_groups, views_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Change:
    """One tensor whose values differ; 0 and -0 do not.

    `mean` is mean|a - b| / mean|a|, `largest` is max|a - b|, both over finite values of a.
    """

    name: str
    largest: float
    mean: float
    differing: int
    elements: int
    checksums: tuple[str, str]


@dataclass(slots=True)
class Difference:
    """All differences of two checkpoints, and how many tensors are equal."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    shapes: dict[str, tuple] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    changed: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    equal: int = 0
    read_bytes: int = 0

    def exit_code(self, tolerance: float = 0.0) -> int:
        """0 when keys and shapes agree and no tensor's mean relative change exceeds the tolerance."""
        beyond = any(not change.mean <= tolerance for change in self.changed)
        return 1 if self.only_first or self.only_second or self.shapes or beyond else 0

    def as_dict(self) -> dict:
        """For JSON, which knows no infinity: an infinite change is the text "inf"."""
        content = asdict(self)
        for change in content["changed"]:
            change |= {k: str(v) for k, v in change.items() if isinstance(v, float) and not math.isfinite(v)}
        return content


def diff(
    first: Path | str, second: Path | str, values: bool = True, progress: Callable[[int, int], None] | None = None
) -> Difference:
    """Compare two checkpoints.

    Args:
        values: read the data; else compare keys, shapes and dtypes only.

    Raises:
        UsageFault: one of the folders holds no checkpoint.
        Fault: one of them has broken shards.
    """
    one, other = (_read(Path(folder)) for folder in (first, second))
    mine, my_names = views_of(one)
    theirs, their_names = views_of(other)
    result = Difference()
    for folder, names in ((one.path, my_names), (other.path, their_names)):
        if names:
            shared, stored = next(iter(names.items()))
            result.notes.append(f"{folder}: {len(names)} names are spelled otherwise, like {stored} for {shared}")
    _tie(one, mine, theirs, result)
    _tie(other, theirs, mine, result)
    result.only_first = sorted(mine.keys() - theirs.keys())
    result.only_second = sorted(theirs.keys() - mine.keys())
    common = [name for name in mine if name in theirs]
    total = sum(mine[name].span.nbytes + theirs[name].span.nbytes for name in common)
    with _opened(mine, theirs) as descriptors:
        for name in common:
            a, b = mine[name], theirs[name]
            if a.span.dtype != b.span.dtype:
                result.dtypes[name] = (a.span.dtype, b.span.dtype)
            if a.span.shape != b.span.shape:
                result.shapes[name] = (a.span.shape, b.span.shape)
                continue
            if values:
                change = compare(name, a, b, descriptors)
                result.read_bytes += a.span.nbytes + b.span.nbytes
                if change:
                    result.changed.append(change)
                else:
                    result.equal += 1
            if progress:
                progress(result.read_bytes, total)
    result.changed.sort(key=lambda change: -change.mean)
    return result


def _read(folder: Path) -> Checkpoint:
    checkpoint = read_checkpoint(folder)
    for fault in checkpoint.broken.values():
        raise Fault(f"{fault}; `ckpt verify {folder}` lists everything")
    return checkpoint


def _tie(checkpoint: Checkpoint, mine: dict[str, View], theirs: dict[str, View], result: Difference) -> None:
    """Let a tied head stand for itself when the other side stores one."""
    if is_tied(checkpoint.config) and HEAD not in mine and HEAD in theirs and EMBEDDING in mine:
        mine[HEAD] = mine[EMBEDDING]
        result.notes.append(f"{checkpoint.path}: lm_head is tied, its embedding is compared with the other's lm_head")


@contextmanager
def _opened(*sides: dict[str, View]) -> Iterator[dict[tuple[Path, str], int]]:
    with ExitStack() as stack:
        descriptors: dict[tuple[Path, str], int] = {}
        for view in (view for side in sides for view in side.values()):
            for span in filter(None, (view.span, view.scale)):
                if (key := (view.folder, span.file)) not in descriptors:
                    descriptors[key] = os.open(view.folder / span.file, os.O_RDONLY)
                    stack.callback(os.close, descriptors[key])
        yield descriptors


def compare(name: str, a: View, b: View, descriptors: dict) -> Change | None:
    """Compare the values of two views of one shape; None when they are equal.

    Equal bytes of one dtype are equal without arithmetic.
    """
    if a.span.dtype == b.span.dtype and not (a.scale or b.scale):
        for first, last in row_groups(a, b):
            mine, theirs = (read_rows(view, descriptors, first, last) for view in (a, b))
            if not np.array_equal(_words(mine), _words(theirs)):
                break
        else:
            return None
    return measure(name, a, b, descriptors)


def measure(name: str, a: View, b: View, descriptors: dict) -> Change | None:
    """Measure how far two views are apart; None when all values are equal.

    NaN in the same place is equal; NaN or infinity against a number is an infinite change.
    """
    scales = [read_scales(v.scale, descriptors[v.folder, v.scale.file], name) if v.scale else None for v in (a, b)]
    largest = difference = magnitude = 0.0
    differing = 0
    for first, last in row_groups(a, b):
        raw = [read_rows(view, descriptors, first, last) for view in (a, b)]
        x, y = (decode(v, data, s, first, last) for v, data, s in zip((a, b), raw, scales, strict=True))
        magnitude += float(np.abs(x[np.isfinite(x)]).sum(dtype=np.float64))
        unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
        if unequal.any():
            gap = np.abs(x[unequal].astype(np.float64) - y[unequal])
            gap[np.isnan(gap)] = np.inf
            largest, difference = max(largest, float(gap.max())), difference + float(gap.sum())
            differing += gap.size
    if not differing:
        return None
    buffer = np.empty(PIECE, np.uint8)
    spans = [(descriptors[view.folder, view.span.file], view.span) for view in (a, b)]
    sums = tuple(range_checksum(descriptor, s.begin, s.end, buffer, s.file) for descriptor, s in spans)
    mean = difference / magnitude if magnitude else float("inf")
    return Change(name, largest, mean, differing, a.rows * a.columns, sums)


def _words(data: np.ndarray) -> np.ndarray:
    """The bytes as 8-byte words where they divide: compared eight times as fast."""
    return data.view(np.uint64) if data.size % 8 == 0 else data


def digest_lines(folder: Path | str, workers: int = 1, progress=None) -> Iterator[str]:
    """One line per tensor, sorted by name, then one for all: to compare machines that cannot see each other."""
    from ckpt_tools.deep import read_all

    checkpoint = _read(Path(folder))
    checksums, _ = read_all(checkpoint, workers, progress)
    tensors, everything = checkpoint.tensors(), Checksum()
    for name in sorted(checksums):
        shape = "x".join(map(str, tensors[name].shape)) or "scalar"
        yield (line := f"{checksums[name]}  {tensors[name].dtype:<8} {shape:<16} {name}")
        padded = line.encode() + bytes(-len(line.encode()) % 8)
        everything.update(np.frombuffer(padded, np.uint8))
    yield f"{everything.hexdigest()}  all      {len(checksums)} tensors"


def describe(result: Difference, first: Path, second: Path, limit: int, tolerance: float) -> list[str]:
    """The differences in lines for a person; the tensors that changed most come first."""
    lines = [f"note: {note}" for note in result.notes]
    for names, folder in ((result.only_first, first), (result.only_second, second)):
        lines += [f"only in {folder}: {name}" for name in names[:limit]]
        if len(names) > limit:
            lines.append(f"only in {folder}: {len(names) - limit} more (--limit)")
    lines += [f"shape of {name}: {list(a)} and {list(b)}" for name, (a, b) in list(result.shapes.items())[:limit]]
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, pair in result.dtypes.items():
        kinds.setdefault(pair, []).append(name)
    lines += [f"dtype {a} and {b}: {len(names)} tensors, first {names[0]}" for (a, b), names in kinds.items()]
    for change in result.changed[:limit]:
        share = change.differing / max(1, change.elements)
        size = f"mean {change.mean:.3g}, max {change.largest:.3g}, {share:.1%} of values"
        lines.append(f"changed {change.name}: {size}  {change.checksums[0]} {change.checksums[1]}")
    if len(result.changed) > limit:
        lines.append(f"changed: {len(result.changed) - limit} more, all with a smaller mean (--limit)")
    beyond = sum(not change.mean <= tolerance for change in result.changed)
    allowed = f", {beyond} beyond the tolerance {tolerance:g}" if tolerance else ""
    return [*lines, f"{result.equal} tensors equal, {len(result.changed)} changed{allowed}"]
