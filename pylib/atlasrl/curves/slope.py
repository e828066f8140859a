"""How fast a noisy curve rises, robustly, and how sure that is."""

from __future__ import annotations

import numpy as np

BLOCKS = 24
RESAMPLES = 200


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The Theil-Sen slope of a curve: the median over all pairs of (block averages of) its points."""
    blocks = min(BLOCKS, len(x))
    return float(_slopes(_block_means(x, blocks), _block_means(y, blocks), np.arange(blocks)[None])[0])


def slope_ratio(x: np.ndarray, candidate: np.ndarray, baseline: np.ndarray) -> tuple[float, float, float] | None:
    """Ratio of the Theil-Sen slopes of two curves on the same x, with the ends of its 95 % bootstrap interval.

    Points are first averaged in at most 24 blocks, since neighbouring steps of a training run are not independent, and
    the same blocks are drawn for both curves. None when the baseline has no slope that differs from zero: the ratio
    would mean nothing.
    """
    blocks = min(BLOCKS, len(x))
    if blocks < 5:
        return None
    x, candidate, baseline = (_block_means(a, blocks) for a in (x, candidate, baseline))
    draws = np.random.default_rng(0).integers(0, blocks, (RESAMPLES, blocks))
    draws[0] = np.arange(blocks)
    below = _slopes(x, baseline, draws)
    low, high = np.nanpercentile(below, [2.5, 97.5])
    if not (low > 0 or high < 0):
        return None
    ratios = _slopes(x, candidate, draws) / below
    return float(ratios[0]), *(float(end) for end in np.nanpercentile(ratios, [2.5, 97.5]))


def _block_means(values: np.ndarray, blocks: int) -> np.ndarray:
    edges = np.linspace(0, len(values), blocks + 1).astype(int)
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def _slopes(x: np.ndarray, y: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """The median slope over all pairs of points, for each draw; draws has shape (resamples, points)."""
    first, second = np.triu_indices(len(x), 1)
    order = np.sort(draws, axis=1)
    i, j = order[:, first], order[:, second]
    run = x[j] - x[i]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.where(run > 0, (y[j] - y[i]) / run, np.nan)
    return _row_medians(slopes)


def _row_medians(rows: np.ndarray) -> np.ndarray:
    """np.nanmedian along axis 1; numpy's own takes ten times as long on short rows."""
    rows = np.sort(rows, axis=1)  # NaN last
    count = (~np.isnan(rows)).sum(1)
    at = np.arange(len(rows))
    return (rows[at, (count - 1) // 2] + rows[at, count // 2]) / 2
