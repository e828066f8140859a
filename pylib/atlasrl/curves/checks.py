"""The checks that rules.yaml can ask for: each turns a comparison into one number, with its formula in words.

A check returns a Measure, or None when the data cannot answer it (one seed has no band, no resume to look at).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atlasrl.curves import slope as slopes
from atlasrl.curves.comparison import Comparison, averaged, robust_deviation

ROUNDING = 1e-6  # differences below it come from float32 sums, for example a KL of 0 and one of 1e-9

SAME_WEIGHTS = 1e-4  # what float32 rounding makes of the gap between two engines that hold the same weights

GARBLED = (
    "garbled rollout? Responses that all run into the limit never emit an end token: the rollout engine often holds "
    "other weights than the trainer (verl PR #4130: MLA with load_format=dummy on vllm-ascend). Read a few responses "
    "and compare rollout and actor probabilities"
)


@dataclass(frozen=True)
class Measure:
    """A measured number. `errors` is the same measure point by point, where that has a meaning.

    `floor` is what noise alone makes of it; an upper limit is raised to that. `interval` replaces the value when a
    limit is a range: the check fails only if the whole interval is outside.
    """

    value: float
    errors: np.ndarray | None = None
    floor: float = 0.0
    interval: tuple[float, float] | None = None
    first_step: int | None = None
    hint: str = ""


@dataclass(frozen=True)
class Check:
    """`alone`: the check says something about a candidate without any baseline."""

    formula: str
    measure: Callable[[Comparison], Measure | None]
    unit: str = ""
    alone: bool = False


def mean_absolute_error(c: Comparison) -> Measure:
    return Measure(float(c.distance.mean()), c.distance, c.floor)


def mean_relative_error(c: Comparison) -> Measure | None:
    scale = float(np.abs(c.pair.baseline).mean())
    if scale == 0:
        return Measure(0.0 if not c.distance.any() else float("inf"), c.distance)
    return Measure(float(c.distance.mean()) / scale, c.distance / scale, c.floor / scale)


def final_difference(c: Comparison) -> Measure:
    if c.band is not None:
        value = float(c.distance[-c.window :].mean())
    else:
        value = abs(float(c.candidate[-c.window :].mean() - c.baseline[-c.window :].mean()))
    return Measure(value, floor=3 * c.noise * np.sqrt(2 / c.window))


def final_relative_difference(c: Comparison) -> Measure | None:
    scale = float(np.abs(c.baseline[-c.window :]).mean())
    if scale == 0:
        return None
    measure = final_difference(c)
    return Measure(measure.value / scale, floor=measure.floor / scale)


def median_ratio(c: Comparison) -> Measure | None:
    below = float(np.median(np.abs(c.baseline)))
    if below == 0:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = averaged(np.abs(c.candidate), c.window) / averaged(np.abs(c.baseline), c.window)
    return Measure(float(np.median(np.abs(c.candidate))) / below, ratios)


def times_baseline(c: Comparison) -> Measure:
    """A gap that is rounding in the baseline and, though small, a multiple of rounding here."""
    below = max(float(np.median(np.abs(c.baseline))), SAME_WEIGHTS)
    return Measure(float(np.median(np.abs(c.candidate))) / below, averaged(np.abs(c.candidate), c.window) / below)


def slope_of_both(c: Comparison) -> Measure | None:
    x = c.pair.x.astype(float)
    found = slopes.slope_ratio(x, c.candidate, c.baseline)
    if found is None:
        return None
    low, high = found[1:]
    ours = slopes.slope(x, c.candidate)
    for theirs in (slopes.slope(x, seed) for seed in c.pair.baseline):
        if theirs:
            low, high = min(low, ours / theirs), max(high, ours / theirs)
    return Measure(found[0], interval=(low, high))


def outside_band(c: Comparison) -> Measure | None:
    if c.band is None:
        return None
    outside = (c.distance > ROUNDING * (1 + np.abs(c.baseline))).astype(float)
    return Measure(float(outside.mean()), outside)


def mean_value(c: Comparison) -> Measure:
    return Measure(float(c.candidate.mean()), averaged(c.candidate, c.window))


def pinned_at_maximum(c: Comparison) -> Measure | None:
    """The highest mean of three points as a share of the maximum, where the baseline is not pinned too."""
    if not c.maximum or len(c.steps) < 3:
        return None
    ours, theirs = (averaged(curve, 3)[2:] / c.maximum for curve in (c.candidate, c.baseline))
    if not c.alone:
        ours = np.where(theirs >= 0.98, 0.0, ours)
    return Measure(float(ours.max()), np.concatenate([[0.0, 0.0], ours]), hint=GARBLED)


def resume_jump(c: Comparison) -> Measure | None:
    """The largest jump at the start of an attempt, in robust deviations of such jumps elsewhere in the same curve."""
    w, n = c.window, len(c.steps)
    starts = [int(i) for i in np.searchsorted(c.steps, c.boundaries) if w <= i <= n - w]
    if not starts or n < 6 * w:
        return None
    smooth = averaged(c.candidate, w)
    at = np.arange(w, n - w + 1)
    jumps = smooth[at + w - 1] - smooth[at - 1]
    elsewhere = jumps[np.abs(at[:, None] - starts).min(1) >= w]
    if len(elsewhere) < 2 * w or (scale := robust_deviation(elsewhere)) == 0:
        return None
    sizes = {start: abs(float(jumps[start - w] - np.median(elsewhere))) / scale for start in starts}
    worst = max(sizes, key=sizes.get)
    hint = (
        "the curve does not continue where it was: the resume restored other weights, optimizer state or data position"
    )
    return Measure(sizes[worst], first_step=int(c.steps[worst]), hint=hint)


CHECKS = {
    "mean_absolute_error": Check("mean |c - b|", mean_absolute_error),
    "mean_relative_error": Check("mean |c - b| / mean |b|", mean_relative_error, "%"),
    "final_difference": Check("|mean c - mean b| over the last window", final_difference),
    "final_relative_difference": Check("|mean c - mean b| / mean |b|, last window", final_relative_difference, "%"),
    "median_ratio": Check("median |c| / median |b|", median_ratio, "x"),
    "times_baseline": Check(f"median |c| / max(median |b|, {SAME_WEIGHTS:g})", times_baseline, "x"),
    "slope_ratio": Check("Theil-Sen slope of c / of b, 95 % bootstrap interval", slope_of_both, "x"),
    "outside_band": Check("share of points outside the band of the seeds", outside_band, "%"),
    "mean_value": Check("mean c", mean_value, alone=True),
    "pinned_at_maximum": Check("highest mean of 3 points of c / response limit", pinned_at_maximum, "%", alone=True),
    "resume_jump": Check("|step at a resume| / robust deviation of steps elsewhere", resume_jump, "σ", alone=True),
}
