"""One page over the runs of an ablation: their curves laid over each other, each judged against the base."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from atlasrl.ablate import Ablation, Variant, state
from atlasrl.curves import aliases, load, page, report, rules
from atlasrl.curves.curve import Run
from atlasrl.curves.judge import Verdict, judge
from atlasrl.errors import Fault

SHOWN = ("reward", "response_length", "entropy", "grad_norm")
LAST = 5


def html(folder: Path, ablation: Ablation) -> str | None:
    """The page; None while no run has points."""
    runs = {variant.name: found for variant in ablation.variants if (found := _read(folder / variant.name)) is not None}
    base = ablation.variants[0].name
    if base not in runs:
        return None
    verdicts = {name: _verdict(run, runs[base]) for name, run in runs.items() if name != base}
    others = [run for name, run in runs.items() if name != base]
    chosen = rules.load()
    try:
        together = judge(others or [runs[base]], [runs[base]], chosen)
    except Fault:
        return None
    data = report.data(together, others or [runs[base]], [runs[base]], chosen)
    for panel in data["panels"]:
        _judge_each(panel, verdicts)
    data["aligned"] = all(verdict is None or verdict.aligned for verdict in verdicts.values())
    data["headline"] = f"{ablation.recipe}, {ablation.design}: {len(runs)} of {len(ablation.variants)} variants"
    data["notes"] = [line for line in rows(folder, ablation)]
    return page.html(data)


def rows(folder: Path, ablation: Ablation) -> list[str]:
    """One line a variant: what it changes, its state, its last values, and how it compares with the base."""
    base = _read(folder / ablation.variants[0].name)
    return [_row(folder, ablation, variant, base) for variant in ablation.variants]


def _row(folder: Path, ablation: Ablation, variant: Variant, base: Run | None) -> str:
    first = ablation.variants[0]
    changed = {key: value for key, value in variant.values.items() if value != first.values[key]}
    words = ", ".join(f"{key}={value}" for key, value in (changed or variant.values).items())
    run = _read(folder / variant.name)
    parts = [f"{variant.name} ({words})", state(ablation.run(folder, variant))]
    if run is not None:
        parts += [f"step {run.last_step()}", *_last_values(run)]
        if base is not None and variant != first:
            verdict = _verdict(run, base)
            parts.append("too short to judge" if verdict is None else report.headline(verdict))
    return "; ".join(parts)


def _last_values(run: Run) -> list[str]:
    """Means over the last steps."""
    found = [(name, aliases.find(run, aliases.known()[name])) for name in SHOWN]
    return [f"{name} {hit[1].values[-LAST:].mean():.4g}" for name, hit in found if hit is not None]


def _judge_each(panel: dict, verdicts: dict[str, Verdict | None]) -> None:
    """Put the verdicts of the single variants in the place of the joint one, which takes them for seeds."""
    metrics = {
        name: next((m for m in verdict.metrics if m.metric == panel["metric"]), None)
        for name, verdict in verdicts.items()
        if verdict is not None
    }
    judged = {name: metric for name, metric in metrics.items() if metric is not None and metric.status != "not judged"}
    failed = [metric for metric in judged.values() if metric.status == "not aligned"]
    panel["status"] = "not aligned" if failed else "aligned" if judged else "not judged"
    panel["first"] = min((m.first_step for m in failed if m.first_step is not None), default=None)
    panel["findings"] = [
        {**asdict(finding), "check": f"{name}: {finding.check}", "shown": report.number(finding)}
        for name, metric in judged.items()
        for finding in metric.findings
        if finding.passed is not None
    ]


def _verdict(run: Run, base: Run) -> Verdict | None:
    """None where the runs have too few points in common."""
    try:
        verdict = judge([run], [base], rules.load())
    except Fault:
        return None
    return verdict if verdict.judged else None


def _read(path: Path) -> Run | None:
    try:
        return load.load(str(path), allow_truncated=True)
    except Fault:
        return None
