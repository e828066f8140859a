"""What the memory probe wrote (rank<R>.jsonl, one line per phase of a worker) beside what `sharded` predicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.memory import sharded
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.job import MIB
from atlasrl.memory.sharded import Batch
from atlasrl.rundir import read_json_lines

KINDS = ("weights", "buffers", "gradients", "optimizer")


def read(folder: Path) -> list[list[dict]]:
    """The records of every worker, by rank.

    Raises:
        UsageFault: the probe wrote nothing here. Fault: a rank is missing, or a line is damaged.
    """
    files = {int(file.stem.removeprefix("rank")): file for file in folder.glob("rank*.jsonl")}
    if not files:
        raise UsageFault(f"{folder} holds no rank<R>.jsonl; run with the memory probe, see docs/memory.md")
    if sorted(files) != list(range(len(files))):
        raise Fault(f"{folder} holds the ranks {sorted(files)}; the others ended before they wrote, run again")
    return [[*read_json_lines(files[rank])] for rank in sorted(files)]


def exact(records: list[dict]) -> dict[str, int]:
    """Largest measured bytes of every kind of tensor of one worker."""
    found: dict[str, int] = defaultdict(int)
    for record in records:
        for kind in KINDS:
            found[kind] = max(found[kind], record.get(kind, 0))
        if "logits" in record:
            kind = "update_logits" if record["phase"] == "update" else "score_logits"
            found[kind] = max(found[kind], record["logits"])
    return dict(found)


def growth(records: list[dict], phase: str) -> list[int]:
    """Resident growth of every occurrence of a phase: its peak over its beginning."""
    return [record["peak"] - record["start"] for record in records if record["phase"] == phase]


def lines(a: Architecture, b: Batch, workers: list[list[dict]]) -> Iterator[str]:
    """Measured against predicted, worker by worker."""
    world = len(workers)
    growths = {"log_prob": sharded.score_growth(a, b), "update": sharded.update_growth(a, b, world)}
    for rank, records in enumerate(workers):
        found = exact(records)
        for kind, size in asdict(sharded.worker(a, b, world, rank)).items():
            verdict = "as predicted" if found.get(kind) == size else f"predicted {size:,}"
            yield f"worker {rank}  {kind:14} {found.get(kind, 0):>14,} bytes, {verdict}"
        for phase, predicted in growths.items():
            # The first occurrence also loads libraries and makes the optimizer state.
            for step, grown in list(enumerate(growth(records, phase), 1))[1:]:
                off = grown / predicted.total - 1
                yield (
                    f"worker {rank}  {phase:14} grows by {grown / MIB:.1f} MiB in step {step}, predicted "
                    f"{predicted.total / MIB:.1f} ({off:+.1%})"
                )
