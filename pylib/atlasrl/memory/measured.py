"""What the memory probe wrote of every worker (rank<R>.jsonl, a line per phase) beside what is predicted of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.memory import workers
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.job import MIB
from atlasrl.recipe import Recipe
from atlasrl.rundir import read_json_lines

KINDS = ("weights", "buffers", "gradients", "optimizer")


def read(folder: Path) -> list[list[dict]]:
    """The records of every worker, by rank.

    Raises:
        UsageFault: the probe wrote nothing here. Fault: a rank is missing, or a line is damaged.
    """
    files = {int(file.stem.removeprefix("rank")): file for file in folder.glob("rank*.jsonl")}
    if not files:
        raise UsageFault(f"{folder} holds no rank<R>.jsonl; train with --set probe.memory=true on a CPU")
    if sorted(files) != list(range(len(files))):
        raise Fault(f"{folder} holds the ranks {sorted(files)}; the others ended before they wrote, run again")
    return [[*read_json_lines(files[rank])] for rank in sorted(files)]


def tensors(records: list[dict]) -> dict[str, int]:
    """Largest measured bytes of every kind of tensor of one worker."""
    found: dict[str, int] = defaultdict(int)
    for record in records:
        for kind in KINDS:
            found[kind] = max(found[kind], record.get(kind, 0))
        if "logits" in record:
            kind = "update_logits" if record["phase"] == "update" else "score_logits"
            found[kind] = max(found[kind], record["logits"])
    return dict(found)


@dataclass(frozen=True)
class Growth:
    """How one phase of one step made a worker's resident memory grow, bytes."""

    phase: str
    step: int
    measured: int
    predicted: int

    @property
    def off(self) -> float:
        """Measured over predicted, less one."""
        return self.measured / self.predicted - 1


@dataclass(frozen=True)
class Comparison:
    """One worker: bytes of each kind of tensor as (measured, predicted), and the growth of its phases."""

    rank: int
    tensors: dict[str, tuple[int, int]]
    growths: list[Growth]


def compare(recipe: Recipe, a: Architecture, records: list[list[dict]]) -> Iterator[Comparison]:
    """Every worker's records beside its prediction for rows as long, and experts as busy, as they were.

    Of the growths the first step is left out: it also loads libraries and makes the optimizer's state.

    Raises:
        UsageFault: workers of this recipe are not predicted.
    """
    for rank, own in enumerate(records):

        def predicted(record: dict, rank: int = rank) -> workers.Expected:
            return workers.expected(recipe, a, len(records), rank, record["tokens"], record.get("routed"))

        found, longest = tensors(own), max(own, key=lambda record: record["tokens"])
        sizes = {kind: (found.get(kind, 0), size) for kind, size in asdict(predicted(longest).tensors).items()}
        growths, steps = [], defaultdict(int)
        for record in own:
            steps[record["phase"]] += 1
            if steps[record["phase"]] > 1:
                grown = record["peak"] - record["start"]
                expected = predicted(record).growths[record["phase"]].total
                growths.append(Growth(record["phase"], steps[record["phase"]], grown, expected))
        yield Comparison(rank, sizes, growths)


def lines(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Measured against predicted, worker by worker, for a person."""
    for worker in comparisons:
        for kind, (found, size) in worker.tensors.items():
            verdict = "as predicted" if found == size else f"predicted {size:,}"
            yield f"worker {worker.rank}  {kind:14} {found:>14,} bytes, {verdict}"
        for g in worker.growths:
            yield (
                f"worker {worker.rank}  {g.phase:14} grows by {g.measured / MIB:.1f} MiB in step {g.step}, predicted "
                f"{g.predicted / MIB:.1f} ({g.off:+.1%})"
            )
