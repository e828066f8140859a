"""Judge a candidate against its baseline: one verdict per metric, and one overall."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np

from atlasrl.curves import aliases
from atlasrl.curves.aliases import Metric
from atlasrl.curves.align import BY_STEP, Alignment, Pair, pair
from atlasrl.curves.checks import CHECKS, Measure
from atlasrl.curves.comparison import Comparison
from atlasrl.curves.curve import Curve, Run
from atlasrl.curves.rules import Rule, Rules
from atlasrl.errors import UsageFault

Status = Literal["aligned", "not aligned", "not judged"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. `passed` is None when the data could not answer it; `text` says why."""

    check: str
    formula: str
    unit: str
    limit: str
    source: str
    value: float | None
    passed: bool | None
    first_step: int | None
    text: str


@dataclass(frozen=True)
class MetricVerdict:
    """Points used and skipped, and the findings of one metric."""

    metric: str
    title: str
    tags: tuple[str, ...]
    used: int
    skipped: int
    findings: tuple[Finding, ...]
    reason: str = ""

    @property
    def status(self) -> Status:
        if any(f.passed is False for f in self.findings):
            return "not aligned"
        return "aligned" if any(f.passed for f in self.findings) else "not judged"

    @property
    def first_step(self) -> int | None:
        """The first step at which a failed check fails."""
        return min(
            (f.first_step for f in self.findings if f.passed is False and f.first_step is not None), default=None
        )


@dataclass(frozen=True)
class Verdict:
    """The verdict over all metrics. `notes` repeats what reading the runs dropped or found odd."""

    candidate: tuple[str, ...]
    baseline: tuple[str, ...]
    metrics: tuple[MetricVerdict, ...]
    notes: tuple[str, ...] = ()
    pairs: dict[str, Pair] = field(default_factory=dict, repr=False)

    @property
    def judged(self) -> int:
        """How many metrics were judged."""
        return sum(m.status != "not judged" for m in self.metrics)

    @property
    def aligned(self) -> bool:
        """At least one metric was judged, and none fails."""
        return self.judged > 0 and not any(m.status == "not aligned" for m in self.metrics)

    def failures(self) -> list[tuple[MetricVerdict, Finding]]:
        """Failed checks, the earliest step first."""
        failed = [(m, f) for m in self.metrics for f in m.findings if f.passed is False]
        return sorted(failed, key=lambda pair: pair[1].first_step if pair[1].first_step is not None else 2**62)

    def as_dict(self) -> dict:
        """The verdict as JSON-ready data."""
        tree = {
            "aligned": self.aligned,
            "candidate": list(self.candidate),
            "baseline": list(self.baseline),
            "notes": list(self.notes),
        }
        metrics = []
        for metric in self.metrics:
            entry = asdict(metric)
            metrics.append({**entry, "status": metric.status, "first_step": metric.first_step})
        return _finite({**tree, "metrics": metrics})


def judge(
    candidates: list[Run],
    baselines: list[Run],
    rules: Rules,
    how: Alignment = BY_STEP,
    metrics: dict[str, Metric] | None = None,
) -> Verdict:
    """Judge the candidate seeds against the baseline seeds; without a baseline, only the checks that need none.

    Raises:
        UsageFault: an unknown metric in the rules, a run that cannot be put on the axis, or not one metric in common.
    """
    metrics = metrics or aliases.known()
    for name in rules.metrics:
        if name not in metrics:
            raise UsageFault(f"the rules name {name}, which no alias knows; add it with --metric {name}=TAG")
    pairs: dict[str, Pair] = {}
    if not baselines:
        rules = replace(
            rules, metrics={n: tuple(r for r in c if CHECKS[r.check].alone) for n, c in rules.metrics.items()}
        )
    verdicts = [
        _metric(metrics[name], checks, candidates, baselines, rules, how, pairs)
        for name, checks in rules.metrics.items()
    ]
    if not any(verdict.used for verdict in verdicts):
        reasons = "; ".join(f"{v.metric}: {v.reason}" for v in verdicts if v.reason)
        raise UsageFault(f"nothing to compare: {reasons[:600]}")
    notes = [f"{run.name}: {note}" for run in (*candidates, *baselines) for note in reading_notes(run)]
    return Verdict(
        tuple(run.name for run in candidates),
        tuple(run.name for run in baselines),
        tuple(verdicts),
        tuple(notes),
        pairs,
    )


def reading_notes(run: Run) -> list[str]:
    """What the reader dropped or found odd, in sentences."""
    notes = list(run.reading.notes)
    if run.reading.replaced:
        notes.append(f"{run.reading.replaced} of {run.reading.points} points were replaced by a later attempt")
    if run.reading.repeated:
        notes.append(f"{run.reading.repeated} points were logged twice for one step; the last one counts")
    return notes


def _metric(
    metric: Metric,
    checks: tuple[Rule, ...],
    candidates: list[Run],
    baselines: list[Run],
    rules: Rules,
    how: Alignment,
    pairs: dict[str, Pair],
) -> MetricVerdict:
    found = [(run, aliases.find(run, metric)) for run in (*candidates, *(baselines or candidates))]
    missing = [run.name for run, hit in found if hit is None]
    tags = tuple(dict.fromkeys(hit[0] for _, hit in found if hit is not None))
    if missing:
        reason = f"no such curve in {', '.join(missing)}"
        return MetricVerdict(metric.name, metric.title, tags, 0, 0, (), reason)
    curves = [(run, hit[1]) for run, hit in found]
    common = pair(curves[: len(candidates)], curves[len(candidates) :], how)
    pairs[metric.name] = common
    finite = np.isfinite(common.candidate).all(0) & np.isfinite(common.baseline).all(0)
    findings = [_finite_finding(curves[: len(candidates)], how)]
    usable = replace(
        common,
        x=common.x[finite],
        steps=common.steps[finite],
        candidate=common.candidate[:, finite],
        baseline=common.baseline[:, finite],
    )
    used = int(finite.sum())
    skipped = common.skipped + int((~finite).sum())
    if used < rules.least_points:
        reason = f"only {used} common points, {rules.least_points} are needed"
        findings = [f for f in findings if f.passed is False]
        return MetricVerdict(metric.name, metric.title, tags, used, skipped, tuple(findings), reason)
    boundaries = tuple(attempt.first_step for attempt in candidates[0].attempts[1:]) if len(candidates) == 1 else ()
    comparison = Comparison(usable, rules.window, boundaries, _maximum(candidates[0], metric), not baselines)
    findings += [_finding(rule, comparison) for rule in checks]
    return MetricVerdict(metric.name, metric.title, tags, used, skipped, tuple(findings))


def _finite_finding(curves: list[tuple[Run, Curve]], how: Alignment) -> Finding:
    """NaN and infinity fail by themselves: `nan > limit` is false, so no other check would notice."""
    bad = np.concatenate([curve.steps[~np.isfinite(curve.values)] for _, curve in curves])
    if how.first is not None:
        bad = bad[bad >= how.first]
    if how.last is not None:
        bad = bad[bad <= how.last]
    first = int(bad.min()) if len(bad) else None
    text = f"{len(bad)} values are NaN or infinite, the first at step {first}" if len(bad) else "all values are finite"
    return Finding("finite", "count of NaN and infinite c", "", "≤ 0", "", float(len(bad)), not len(bad), first, text)


def _maximum(run: Run, metric: Metric) -> float | None:
    """The longest response a run allows: from its recipe, else the longest one seen."""
    if metric.name != "response_length":
        return None
    try:
        return float(run.context["recipe"]["data"]["max_response_tokens"])
    except (KeyError, TypeError, ValueError):
        longest = aliases.find(run, aliases.known()["response_length_max"])
        return float(np.nanmax(longest[1].values)) if longest and np.isfinite(longest[1].values).any() else None


def _finding(rule: Rule, comparison: Comparison) -> Finding:
    check = CHECKS[rule.check]
    measure = check.measure(comparison)
    if measure is None:
        text = "cannot be answered by these runs"
        return Finding(
            rule.check,
            check.formula,
            check.unit,
            limit_of(rule, rule.at_most, check.unit),
            rule.source,
            None,
            None,
            None,
            text,
        )
    limit, text = limit_of(rule, rule.at_most, check.unit), ""
    if rule.at_most is not None:
        at_most = max(rule.at_most, measure.floor)
        passed = measure.value <= at_most
        if at_most > rule.at_most:
            limit = limit_of(rule, at_most, check.unit)
            text = f"limit {rule.at_most:g} raised to what noise alone makes"
    else:
        at_most = None
        low, high = measure.interval or (measure.value, measure.value)
        passed = low <= rule.between[1] and high >= rule.between[0]
        if measure.interval:
            text = f"95 % interval {low:.2f} .. {high:.2f}"
    first = None
    if not passed:
        first = (
            measure.first_step if measure.first_step is not None else _first_failing(measure, rule, at_most, comparison)
        )
        text = "; ".join(part for part in (text, measure.hint) if part)
    return Finding(rule.check, check.formula, check.unit, limit, rule.source, measure.value, bool(passed), first, text)


def limit_of(rule: Rule, at_most: float | None, unit: str) -> str:
    """The limit as a person reads it; `at_most` may have been raised above that of the rule."""
    if at_most is None:
        return "{:g} – {:g}".format(*rule.between)
    return f"≤ {100 * at_most:.3g} %" if unit == "%" else f"≤ {at_most:.3g}"


def _first_failing(measure: Measure, rule: Rule, at_most: float | None, comparison: Comparison) -> int | None:
    """The first step of the first `window` points in a row that all fail; else the first that fails."""
    if measure.errors is None:
        return None
    if at_most is not None:
        failing = measure.errors > at_most
    else:
        failing = (measure.errors < rule.between[0]) | (measure.errors > rule.between[1])
    if not failing.any():
        return None
    stretch = np.convolve(failing, np.ones(comparison.window), "valid") >= comparison.window
    first = int(stretch.argmax()) if stretch.any() else int(failing.argmax())
    return int(comparison.steps[first])


def _finite(tree):
    """NaN and infinity as strings: JSON has no such numbers."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_finite(value) for value in tree]
    return str(tree) if isinstance(tree, float) and not np.isfinite(tree) else tree
