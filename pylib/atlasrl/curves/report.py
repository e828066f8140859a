"""The verdict as a table for a terminal and as data for the page, the picture and TensorBoard."""

from __future__ import annotations

import io
from dataclasses import asdict

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atlasrl.curves import aliases
from atlasrl.curves.aliases import Metric
from atlasrl.curves.comparison import Comparison
from atlasrl.curves.curve import Run
from atlasrl.curves.judge import Finding, MetricVerdict, Verdict
from atlasrl.curves.rules import Rules

COLOURS = {"aligned": "green", "not aligned": "bold red", "not judged": "bright_black"}
WIDTH = 100


def text(verdict: Verdict, console: Console | None = None, details: bool = False) -> str:
    """The verdict as a table of at most 100 columns; `details` adds every check with its formula and source."""
    out = console or Console(width=WIDTH, file=io.StringIO())
    out.print(Text(f"candidate  {', '.join(verdict.candidate)}"))
    out.print(Text(f"baseline   {', '.join(verdict.baseline) or '(none: only checks that need no baseline)'}"))
    out.print(_table(verdict))
    for metric, finding in verdict.failures():
        since = f" from step {finding.first_step}" if finding.first_step is not None else ""
        out.print(Text(f"{metric.metric}: {finding.check}{since}: {number(finding)}, limit {finding.limit}", "red"))
        out.print(Text(f"    {finding.formula}" + (f"; {finding.text}" if finding.text else "")))
    if details:
        _print_details(verdict, out)
    for reason, names in _unjudged(verdict).items():
        out.print(Text(f"not judged: {', '.join(names)}: {reason}", "bright_black"))
    for note in verdict.notes:
        out.print(Text(f"note: {note}", "yellow"))
    out.print(Text(headline(verdict), "bold green" if verdict.aligned else "bold red"))
    return out.file.getvalue() if console is None else ""


def _table(verdict: Verdict) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("metric", "verdict", "used", "skipped", "first failed or first check", "value", "limit"):
        table.add_column(title, justify="right" if title in ("used", "skipped", "value") else "left", no_wrap=True)
    for metric in verdict.metrics:
        worst = worst_of(metric)
        if worst is None:
            continue
        status = Text(metric.status, COLOURS[metric.status])
        cells = (str(metric.used), str(metric.skipped), Text(worst.check), Text(number(worst)), Text(worst.limit))
        table.add_row(Text(metric.metric), status, *cells)
    return table


def _unjudged(verdict: Verdict) -> dict[str, list[str]]:
    """Reason -> metrics that were not judged for it."""
    reasons: dict[str, list[str]] = {}
    for metric in verdict.metrics:
        if metric.status == "not judged":
            reasons.setdefault(metric.reason or "no check applies", []).append(metric.metric)
    return reasons


def headline(verdict: Verdict) -> str:
    """One line: aligned or not, what failed first, from which step."""
    if verdict.aligned:
        state = "aligned" if verdict.baseline else "no baseline"
        return f"{state}: {verdict.judged} of {len(verdict.metrics)} metrics judged, none fails"
    if not verdict.judged:
        return "nothing could be judged"
    metric, finding = verdict.failures()[0]
    since = f" from step {finding.first_step}" if finding.first_step is not None else ""
    failed = [m.metric for m in verdict.metrics if m.status == "not aligned"]
    return f"not aligned: {', '.join(failed)}; first {metric.metric} ({finding.check}){since}"


def worst_of(metric: MetricVerdict) -> Finding | None:
    """The first failed finding, else the first that was answered."""
    failed = [f for f in metric.findings if f.passed is False]
    answered = [f for f in metric.findings if f.passed is not None]
    return (failed or answered[1:] or answered or [None])[0]


def number(finding: Finding) -> str:
    """The value of a finding with its unit, as a person reads it."""
    if finding.value is None:
        return "-"
    if finding.unit == "%":
        return f"{100 * finding.value:.3g} %"
    return f"{finding.value:.4g}" + (f" {finding.unit}" if finding.unit else "")


def _print_details(verdict: Verdict, out: Console) -> None:
    for metric in verdict.metrics:
        for f in metric.findings:
            mark = {True: "pass", False: "FAIL", None: "  - "}[f.passed]
            out.print(Text(f"{mark}  {metric.metric} {f.check} = {f.formula}: {number(f)}, limit {f.limit}"))
            for line in filter(None, (f.text, f.source)):
                out.print(Text(f"      {line}", "bright_black"))


def data(
    verdict: Verdict,
    candidates: list[Run],
    baselines: list[Run],
    rules: Rules,
    metrics: dict[str, Metric] | None = None,
    axis: str = "step",
) -> dict:
    """Everything the page shows, JSON-ready: verdict, and for each metric the curves, the band and the attempts."""
    metrics = metrics or aliases.known()
    panels = []
    for metric in verdict.metrics:
        pair = verdict.pairs.get(metric.metric)
        if pair is None or not len(pair.x):
            continue
        finite = np.isfinite(pair.candidate).all(0) & np.isfinite(pair.baseline).all(0)
        band = Comparison(pair, rules.window).band if finite.all() and len(pair.baseline) > 1 else None
        panels.append(
            {
                "metric": metric.metric,
                "title": metrics[metric.metric].title,
                "status": metric.status,
                "first": metric.first_step,
                "findings": [{**asdict(f), "shown": number(f)} for f in metric.findings],
                "tags": list(metric.tags),
                "used": metric.used,
                "skipped": metric.skipped,
                "x": _numbers(pair.x),
                "steps": pair.steps.tolist(),
                "candidate": [_numbers(curve) for curve in pair.candidate],
                "baseline": [_numbers(curve) for curve in pair.baseline] if baselines else [],
                "band": [_numbers(end) for end in band] if band else None,
            }
        )
    boundaries = sorted({a.first_step for run in candidates for a in run.attempts[1:]})
    return {
        "aligned": verdict.aligned,
        "headline": headline(verdict),
        "candidate": list(verdict.candidate),
        "baseline": list(verdict.baseline),
        "notes": list(verdict.notes),
        "unjudged": [
            {"metric": m.metric, "reason": m.reason} for m in verdict.metrics if m.metric not in verdict.pairs
        ],
        "attempts": boundaries,
        "axis": axis,
        "window": rules.window,
        "panels": panels,
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    """Seven digits are enough for a picture; NaN and infinity become gaps."""
    return [float(f"{v:.7g}") if np.isfinite(v) else None for v in values.tolist()]
