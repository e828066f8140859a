"""Put a candidate and its baselines on common points, and say how many points that used and skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from atlasrl.curves import aliases
from atlasrl.curves.curve import Curve, Run
from atlasrl.errors import UsageFault

Axis = Literal["step", "samples", "tokens", "wall"]


@dataclass(frozen=True)
class Alignment:
    """How to line up: candidate step s meets baseline step s * stride + offset; `first`..`last` are candidate steps."""

    axis: Axis = "step"
    first: int | None = None
    last: int | None = None
    stride: float = 1
    offset: float = 0


BY_STEP = Alignment()


@dataclass(frozen=True)
class Pair:
    """One metric on common points.

    x: (points,); candidate: (candidate seeds, points); baseline: (baseline seeds, points); steps: candidate steps.
    `skipped` counts the points of any curve that have no partner.
    """

    x: np.ndarray
    steps: np.ndarray
    candidate: np.ndarray
    baseline: np.ndarray
    skipped: int


def pair(candidates: list[tuple[Run, Curve]], baselines: list[tuple[Run, Curve]], how: Alignment) -> Pair:
    """Points that all curves have. On the step axis steps must meet exactly; on others baselines are interpolated.

    Raises:
        UsageFault: a run cannot be put on the axis: unknown batch size, no token count, no clock.
    """
    reference = _within(candidates[0][1], how)
    curves = [_within(curve, how) for _, curve in candidates]
    others = [curve for _, curve in baselines]
    if how.axis == "step":
        return _by_step(curves, others, how)
    x = [_position(run, how.axis)(curve.steps) for (run, _), curve in zip(candidates, curves, strict=True)]
    y = [_position(run, how.axis)(curve.steps) for run, curve in baselines]
    low = max(positions[0] for positions in (*x, *y) if len(positions))
    high = min(positions[-1] for positions in (*x, *y) if len(positions))
    chosen = (x[0] >= low) & (x[0] <= high)
    common = x[0][chosen]
    return Pair(
        common,
        reference.steps[chosen],
        _interpolated(common, x, curves),
        _interpolated(common, y, others),
        int(sum(((p < low) | (p > high)).sum() for p in (*x, *y))),
    )


def _within(curve: Curve, how: Alignment) -> Curve:
    first = -np.inf if how.first is None else how.first
    last = np.inf if how.last is None else how.last
    chosen = (curve.steps >= first) & (curve.steps <= last)
    return Curve(curve.steps[chosen], curve.values[chosen], curve.walls[chosen])


def _by_step(candidates: list[Curve], baselines: list[Curve], how: Alignment) -> Pair:
    wanted = [curve.steps.astype(float) for curve in candidates]
    there = [(curve.steps - how.offset) / how.stride for curve in baselines]
    common = wanted[0]
    for steps in (*wanted[1:], *there):
        common = np.intersect1d(common, steps)
    pick = [np.searchsorted(steps, common) for steps in (*wanted, *there)]
    values = [curve.values[i] for curve, i in zip((*candidates, *baselines), pick, strict=True)]
    skipped = sum(len(curve) for curve in (*candidates, *baselines)) - len(common) * len(values)
    split = len(candidates)
    return Pair(common, common.astype(np.int64), np.array(values[:split]), np.array(values[split:]), skipped)


def _interpolated(x: np.ndarray, positions: list[np.ndarray], curves: list[Curve]) -> np.ndarray:
    return np.array([np.interp(x, p, curve.values) for p, curve in zip(positions, curves, strict=True)])


def _position(run: Run, axis: Axis):
    """A function from steps to the axis: samples, tokens or hours since the start of the run, rising with the step."""
    if axis == "samples":
        per_step = samples_per_step(run)
        return lambda steps: steps * per_step
    curve = _tokens(run) if axis == "tokens" else _hours(run)
    return lambda steps: np.interp(steps, curve.steps, curve.values)


def samples_per_step(run: Run) -> float:
    """Answers per training step, from the recipe that the run knows.

    Raises:
        UsageFault: the run has no recipe.
    """
    recipe = run.context.get("recipe")
    try:
        return float(recipe["dapo"]["train_batch_size"]) * float(recipe["rollout"]["samples"])
    except (TypeError, KeyError, ValueError):
        raise UsageFault(
            f"{run.name}: --x samples needs the batch size, and this source has no recipe; "
            "use --stride (candidate steps to baseline steps) or --x tokens"
        ) from None


def _tokens(run: Run) -> Curve:
    metrics = aliases.known()
    if total := aliases.find(run, metrics["total_tokens"]):
        return total[1]
    if each := aliases.find(run, metrics["step_tokens"]):
        return Curve(each[1].steps, np.cumsum(np.nan_to_num(each[1].values)), each[1].walls)
    raise UsageFault(f"{run.name}: --x tokens needs one of {', '.join(metrics['step_tokens'].tags)}")


def _hours(run: Run) -> Curve:
    """Hours of training: logged seconds of each step, else the clock without the gaps between attempts."""
    if found := aliases.find(run, aliases.known()["step_seconds"]):
        return Curve(found[1].steps, np.cumsum(np.nan_to_num(found[1].values)) / 3600, found[1].walls)
    longest = max(run.curves.values(), key=len)
    if np.isnan(longest.walls).any():
        raise UsageFault(f"{run.name}: --x wall needs a clock or perf/time_per_step, and this source has neither")
    passed = np.diff(longest.walls, prepend=longest.walls[:1])
    resumed = np.isin(longest.steps, [attempt.first_step for attempt in run.attempts[1:]])
    passed[resumed] = np.median(passed[~resumed])
    return Curve(longest.steps, np.cumsum(np.maximum(passed, 0)) / 3600, longest.walls)
