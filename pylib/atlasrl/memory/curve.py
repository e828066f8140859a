"""A memory curve of any length in bounded space: exact extremes, an envelope, and exact extremes between marks."""

from __future__ import annotations

import numpy as np

ENVELOPE = 4096  # points kept; twice as many before they are halved


class Curve:
    """Values over time, added block by block in any block size.

    Times are microseconds, values bytes. `marks` are sorted times that cut the axis into len(marks) + 1 intervals (the
    first before marks[0]); every interval keeps its own exact minimum, maximum, first and last value.
    """

    def __init__(self, marks: np.ndarray | None = None):
        self.count = 0
        self.peak, self.peak_time = -np.inf, np.nan
        self.first_time, self.last_time = np.inf, -np.inf
        self._times, self._low, self._high = np.empty(0), np.empty(0), np.empty(0)
        self._stride = 1  # values behind one point of the envelope
        self._rest = np.empty((2, 0))  # values that do not fill a point yet
        self.marks = np.empty(0) if marks is None else np.asarray(marks, dtype=float)
        intervals = len(self.marks) + 1
        self.interval_low = np.full(intervals, np.inf)
        self.interval_high = np.full(intervals, -np.inf)
        self.interval_first = np.full(intervals, np.nan)
        self.interval_last = np.full(intervals, np.nan)

    def add(self, times: np.ndarray, values: np.ndarray) -> None:
        """Append a block; rows without a time or a value are left out."""
        known = np.isfinite(times) & np.isfinite(values)
        if not known.all():
            times, values = times[known], values[known]
        if not len(values):
            return
        at = int(values.argmax())
        if values[at] > self.peak:
            self.peak, self.peak_time = float(values[at]), float(times[at])
        self.count += len(values)
        self.first_time = min(self.first_time, float(times.min()))
        self.last_time = max(self.last_time, float(times.max()))
        self._add_intervals(times, values)
        self._add_envelope(times, values)

    def _add_intervals(self, times: np.ndarray, values: np.ndarray) -> None:
        if len(self.marks):
            intervals = np.searchsorted(self.marks, times, side="right")
            # Runs of one interval; unsorted times make short ones.
            starts = np.r_[0, np.flatnonzero(np.diff(intervals)) + 1]
            at = intervals[starts]
        else:
            starts = at = np.zeros(1, dtype=int)
        np.minimum.at(self.interval_low, at, np.minimum.reduceat(values, starts))
        np.maximum.at(self.interval_high, at, np.maximum.reduceat(values, starts))
        for interval, start, end in zip(at, starts, np.r_[starts[1:], len(values)], strict=True):
            if np.isnan(self.interval_first[interval]):
                self.interval_first[interval] = values[start]
            self.interval_last[interval] = values[end - 1]

    def _add_envelope(self, times: np.ndarray, values: np.ndarray) -> None:
        block = np.concatenate([self._rest, np.stack([times, values])], axis=1)
        whole = block.shape[1] // self._stride * self._stride
        points = block[:, :whole].reshape(2, -1, self._stride)
        self._rest = block[:, whole:]
        self._times = np.concatenate([self._times, points[0, :, 0]])
        self._low = np.concatenate([self._low, points[1].min(axis=1)])
        self._high = np.concatenate([self._high, points[1].max(axis=1)])
        while len(self._times) >= 2 * ENVELOPE:
            even = len(self._times) // 2 * 2
            if even < len(self._times):  # an odd last point waits, as its values are gone: keep it as it is
                tail = (self._times[even:], self._low[even:], self._high[even:])
            else:
                tail = (np.empty(0),) * 3
            self._times = np.r_[self._times[:even:2], tail[0]]
            self._low = np.r_[self._low[:even].reshape(-1, 2).min(axis=1), tail[1]]
            self._high = np.r_[self._high[:even].reshape(-1, 2).max(axis=1), tail[2]]
            self._stride *= 2

    def envelope(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(times, lowest, highest) of at most 2 x ENVELOPE + 1 consecutive groups of values."""
        times, low, high = self._times, self._low, self._high
        if self._rest.shape[1]:
            times = np.r_[times, self._rest[0, 0]]
            low, high = np.r_[low, self._rest[1].min()], np.r_[high, self._rest[1].max()]
        return times, low, high

    def growth(self, windows: int = 20) -> float:
        """Growth in bytes per second of the lower envelope: what never comes back.

        The minimum of each window is compared with every later one; the median slope withstands single outliers
        (Theil-Sen). 0 when the curve is too short to tell.
        """
        times, low, _ = self.envelope()
        if len(times) < 2 * windows:
            return 0.0
        groups = np.array_split(np.arange(len(times)), windows)
        at = np.array([times[g].mean() for g in groups])
        floor = np.array([low[g].min() for g in groups])
        i, j = np.triu_indices(windows, 1)
        return float(np.median((floor[j] - floor[i]) / (at[j] - at[i]))) * 1e6
