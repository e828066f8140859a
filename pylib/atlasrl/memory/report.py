"""Predictions as text and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from atlasrl.memory.architecture import Architecture
from atlasrl.memory.job import GIB, MIB
from atlasrl.memory.model import Phase, Prediction, Stage
from atlasrl.memory.planner import Candidate, Remedy
from atlasrl.memory.snapshot import Snapshot
from atlasrl.memory.terms import PHASES, TERMS
from atlasrl.memory.workers import batch_of, expected

if TYPE_CHECKING:
    from atlasrl.recipe import Recipe


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def table(rows: list[list[str]], left: int = 1) -> str:
    """Columns aligned: the first `left` to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in rows)


def text(name: str, p: Prediction, remedies: list[Remedy], together: list[Remedy], explain: bool = False) -> str:
    """The whole answer for a person: stages and phases, the tightest one, KV cache, host, verdict, remedies."""
    s, j = p.split, p.job
    stage, phase, _ = p.tightest
    parts = [
        f"{name}: {s.world} devices of {gib(j.device)} GiB, {s}, DP {s.data}, expert DP {s.expert_data}; "
        f"rollout TP{j.rollout.tensor} EP{j.rollout.expert}",
        _stages(p),
        f"tightest: {phase} on stage {stage.rank} ({PHASES[phase]})\n{_terms(stage.phases[phase], explain)}",
        f"KV cache: {p.cache_tokens:,} tokens a device, {p.sequences} answers of {j.sequence:,} tokens at once\n"
        f"host memory of a node: {gib(sum(p.host.values()))} GiB "
        f"({', '.join(f'{use} {gib(size)}' for use, size in p.host.items()) or 'nothing is offloaded'})",
        verdict(p),
    ]
    if remedies:
        parts.append(_remedies(remedies[:3], phase))
    if together:
        parts.append(
            f"together they make it fit: {' '.join(r.change for r in together)} ({gib(together[-1].peak)} GiB)"
        )
    return "\n\n".join(parts)


def verdict(p: Prediction) -> str:
    """One line: does it fit, where is it tightest."""
    stage, phase, peak = p.tightest
    where = f"{phase} on stage {stage.rank} needs {gib(peak)} of {gib(p.job.device)} GiB"
    if p.spare < 0:
        return f"does not fit: {where}, {gib(-p.spare)} too many"
    if p.sequences < 1:
        return (
            f"does not fit: the KV cache holds {p.cache_tokens:,} tokens, one answer needs {p.job.sequence:,}; "
            "raise rollout.memory_fraction or divide the rollout further"
        )
    return f"fits: {where}, {gib(p.spare)} spare"


def _stages(p: Prediction) -> str:
    phases = list(p.stages[0].phases)
    _, tightest_phase, peak = p.tightest
    rows = [["GiB a device", "layers", "parameters", *phases]]
    for stage in p.stages:
        marks = {name: "*" if name == tightest_phase and size == peak else " " for name, size in stage.peaks.items()}
        rows.append(
            [
                f"stage {stage.rank}",
                str(stage.layers),
                f"{stage.count.total:,}",
                *(gib(size) + marks[name] for name, size in stage.peaks.items()),
            ]
        )
    return table(rows)


def _terms(terms: Phase, explain: bool) -> str:
    lines = []
    for term, size in sorted(terms.items(), key=lambda item: -item[1]):
        if size:
            lines.append(f"  {gib(size):>7}  {term}")
            if explain:
                e = TERMS[term]
                lines += [f"           = {e.formula}", f"           {e.why}", f"           source: {e.source}"]
    return "\n".join(lines)


def _remedies(remedies: list[Remedy], phase: str) -> str:
    rows = [["cheapest remedies", f"{phase} GiB", "highest then", "s a step"]]
    for r in remedies:
        rows.append(
            [f"  {r.change}", f"-{gib(r.saved)}", gib(r.peak) + ("" if r.fits else " (over)"), f"{r.seconds:+.0f}"]
        )
    return table(rows)


def search_text(found: list[Candidate], own: Candidate | None, limit: int) -> str:
    """The cheapest splits with what they cost, and where the recipe's own one stands and why."""
    if not found:
        return "no legal split fits; add nodes, or set parallel.offload=true, parallel.recompute=full"
    causes = ["compute", "pipeline bubble", "tensor traffic", "expert traffic", "offload traffic", "generation"]
    rows = [
        [
            "",
            "split",
            "s a step",
            *(cause.split()[-1 if cause == "pipeline bubble" else 0] for cause in causes),
            "spare",
        ]
    ]
    for place, c in enumerate(found[:limit], 1):
        rows.append(
            [
                f"{place}",
                str(c.split),
                f"{c.cost:.0f}",
                *(f"{c.seconds.get(cause, 0):.0f}" for cause in causes),
                gib(c.prediction.spare),
            ]
        )
    lines = [f"{len(found)} splits are legal and fit; seconds are estimates that only rank", table(rows, left=2)]
    if own is not None:
        lines.append(textwrap.fill(rank_reason(found, own), 100))
    return "\n\n".join(lines)


def rank_reason(found: list[Candidate], own: Candidate) -> str:
    """Why the recipe's split stands where it stands: the causes that make it dearer than the cheapest."""
    place, best = found.index(own) + 1, found[0]
    if place == 1:
        return f"the recipe's {own.split} is the cheapest of them"
    more = {cause: own.seconds.get(cause, 0) - best.seconds.get(cause, 0) for cause in own.seconds | best.seconds}
    shown = sorted(((cause, s) for cause, s in more.items() if abs(s) >= 0.5), key=lambda item: -abs(item[1]))
    reasons = ", ".join(f"{cause} {seconds:+.0f} s" for cause, seconds in shown[:4])
    return (
        f"the recipe's {own.split} is number {place} of {len(found)}: {own.cost - best.cost:+.0f} s a step against the "
        f"first ({reasons}), {(own.prediction.spare - best.prediction.spare) / GIB:+.1f} GiB spare"
    )


def as_json(name: str, p: Prediction, remedies: list[Remedy], together: list[Remedy]) -> dict:
    """Everything of the text, sizes in bytes."""
    stage, phase, peak = p.tightest
    return {
        "recipe": name,
        "split": split_json(p),
        "device_bytes": p.job.device,
        "fits": p.fits,
        "verdict": verdict(p),
        "tightest": {"stage": stage.rank, "phase": phase, "bytes": peak, "spare_bytes": p.spare},
        "stages": [_stage_json(each) for each in p.stages],
        "rollout": {"cache_tokens": p.cache_tokens, "sequences": p.sequences},
        "host_bytes_of_a_node": p.host,
        "remedies": [
            {
                "change": r.change,
                "saved_bytes": r.saved,
                "peak_bytes": r.peak,
                "fits": r.fits,
                "seconds": round(r.seconds, 1),
            }
            for r in remedies
        ],
        "together": [r.change for r in together],
        "terms": {term: TERMS[term]._asdict() for each in p.stages for terms in each.phases.values() for term in terms},
    }


def split_json(p: Prediction) -> dict:
    s = p.split
    return {
        "tensor": s.tensor,
        "pipeline": s.pipeline,
        "expert": s.expert,
        "expert_tensor": s.expert_tensor,
        "context": s.context,
        "virtual": s.virtual,
        "stages": list(s.stages),
        "data": s.data,
        "expert_data": s.expert_data,
        "rollout_tensor": p.job.rollout.tensor,
        "rollout_expert": p.job.rollout.expert,
    }


def _stage_json(stage: Stage) -> dict:
    return {
        "stage": stage.rank,
        "layers": stage.layers,
        "dense_parameters": stage.count.dense,
        "expert_parameters": stage.count.expert,
        "phases": stage.phases,
    }


def candidate_json(c: Candidate) -> dict:
    return {
        "split": split_json(c.prediction),
        "seconds": {cause: round(seconds, 2) for cause, seconds in c.seconds.items()},
        "total_seconds": round(c.cost, 2),
        "spare_bytes": c.prediction.spare,
    }


def workers_text(name: str, recipe: Recipe, a: Architecture, world: int) -> str:
    """The workers of a recipe: exact bytes of their tensors, and the resident growth of the phases.

    Raises:
        UsageFault: workers of this recipe are not predicted.
    """
    workers = [expected(recipe, a, world, rank) for rank in range(world)]
    unequal = len({worker.tensors for worker in workers}) > 1
    shown = [asdict(worker.tensors) for worker in (workers if unequal else workers[:1])]
    rows = [["bytes", *(kind.replace("_", " ") for kind in shown[0])]]
    rows += [
        [f"worker {i}" if unequal else "each worker", *(f"{n:,}" for n in w.values())] for i, w in enumerate(shown)
    ]
    b = batch_of(recipe, world)
    lines = [
        f"{name}: {world} {recipe.backend} workers, {b.rows} answers of {b.tokens} tokens in a micro-batch",
        table(rows),
        "",
    ]
    for phase, growth in workers[0].growths.items():
        terms = ", ".join(f"{term} {size / MIB:.1f}" for term, size in growth.terms.items())
        lines.append(f"{phase} grows by {growth.total / MIB:.1f} MiB: {terms}")
    return "\n".join(lines)


def snapshot_text(s: Snapshot, top: int) -> str:
    """A PyTorch memory snapshot in a few lines."""
    lines = [
        str(s.path),
        f"  {s.allocated / GIB:8.2f} GiB  allocated, {s.reserved / GIB:.2f} reserved, {s.idle / GIB:.2f} idle",
        f"  {s.peak / GIB:8.2f} GiB  highest of the recorded history",
    ]
    lines += [f"  {size / GIB:8.2f} GiB  held by {frame} there" for frame, size in s.holders.most_common(top)]
    return "\n".join(lines)
