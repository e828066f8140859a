"""What was read: curves of a run, where they came from, and what was dropped on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Curve:
    """One scalar over training: arrays of equal length, steps strictly rising, values unsampled.

    `walls` is the writer's clock in seconds since 1970, NaN where the source has none.
    """

    steps: np.ndarray
    values: np.ndarray
    walls: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class Attempt:
    """One process that wrote a stretch of the run: the steps of it that count, and what a later attempt replaced."""

    source: str
    first_step: int
    last_step: int
    replaced: int


@dataclass
class Reading:
    """How complete the reading was. Nothing is dropped without being counted here.

    `replaced` points were overwritten by a later attempt; `repeated` points were logged twice for one step in one
    attempt (the last one counts); `notes` are sentences for a person: damage, unfinished tails, clocks that went back.
    """

    sources: list[str] = field(default_factory=list)
    points: int = 0
    replaced: int = 0
    repeated: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class Run:
    """All curves of a run by tag. `context` holds what is known beside them: recipe, versions."""

    name: str
    curves: dict[str, Curve]
    attempts: list[Attempt] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)
    context: dict = field(default_factory=dict)

    def last_step(self) -> int:
        """The highest step of any curve; 0 for a run without points."""
        return max((int(curve.steps[-1]) for curve in self.curves.values() if len(curve)), default=0)
