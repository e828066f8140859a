"""One metric of candidate and baseline on common points, with the noise that a difference must exceed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atlasrl.curves.align import Pair

BAND = 3.0  # standard deviations of one further seed; 99.7 % of a normal distribution
SHARED_NOISE = 0.5


@dataclass(frozen=True)
class Comparison:
    """The arrays have one entry per common point, NaN and infinite points left out.

    `boundaries` are the first steps of the candidate's attempts after the first; `maximum` is the longest response the
    runs allow, in tokens, if known. `alone`: there is no baseline, and the candidate stands in for it.
    """

    pair: Pair
    window: int
    boundaries: tuple[int, ...] = ()
    maximum: float | None = None
    alone: bool = False

    @cached_property
    def candidate(self) -> np.ndarray:
        return self.pair.candidate.mean(0)

    @cached_property
    def baseline(self) -> np.ndarray:
        return self.pair.baseline.mean(0)

    @property
    def steps(self) -> np.ndarray:
        return self.pair.steps

    @cached_property
    def band(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Lower and upper end of the band of the baseline seeds, averaged over the window; None for one seed.

        The variance between seeds is pooled over a fifth of the run, since the noise of a run changes as it learns.
        """
        seeds = len(self.pair.baseline)
        if seeds < 2:
            return None
        smooth = np.array([averaged(curve, self.window) for curve in self.pair.baseline])
        pooled = averaged(smooth.var(0, ddof=1), max(2 * self.window, len(self.steps) // 5), centred=True)
        half = BAND * np.sqrt(pooled * (1 / len(self.pair.candidate) + 1 / seeds))
        middle = smooth.mean(0)
        return middle - half, middle + half

    @cached_property
    def distance(self) -> np.ndarray:
        """|c - b|, or how far the averaged candidate is outside the band of the seeds."""
        if self.band is None:
            return np.abs(self.candidate - self.baseline)
        low, high = self.band
        smooth = averaged(self.candidate, self.window)
        return np.maximum(np.maximum(low - smooth, smooth - high), 0)

    @cached_property
    def noise(self) -> float:
        """Standard deviation of the step noise that the candidate does not share with a single baseline; else 0.

        Runs on the same data share their noise: then a difference is a difference, however noisy both curves are.
        """
        if self.band is not None or len(self.steps) < 10:
            return 0.0
        ours, theirs = np.diff(self.candidate), np.diff(self.baseline)
        if ours.std() == 0 or theirs.std() == 0 or np.corrcoef(ours, theirs)[0, 1] >= SHARED_NOISE:
            return 0.0
        return robust_deviation(theirs) / np.sqrt(2)

    @cached_property
    def floor(self) -> float:
        """What mean |c - b| is raised to: what noise alone makes of it.

        Two curves with independent normal noise differ by 2 / sqrt(pi) deviations on average; half as much again covers
        that the deviation is an estimate. A band's width is an estimate too, from few seeds: 5 % of its half width.
        """
        if self.band is not None:
            low, high = self.band
            return float(0.05 * (high - low).mean() / 2)
        return 1.5 * 2 / np.sqrt(np.pi) * self.noise


def averaged(values: np.ndarray, window: int, centred: bool = False) -> np.ndarray:
    """The mean of the last `window` points (or of those around), of what there is of them at the ends."""
    before = window // 2 if centred else window - 1
    after = window - 1 - before
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    start, end = np.maximum(at - before, 0), np.minimum(at + after + 1, len(values))
    return (total[end] - total[start]) / (end - start)


def robust_deviation(values: np.ndarray) -> float:
    """1.4826 x the median absolute deviation: the standard deviation of a normal distribution, blind to outliers."""
    return float(1.4826 * np.median(np.abs(values - np.median(values))))
