"""Scalars as columns: the common form of everything the readers return, in the order it was written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Columns:
    """The arrays have one entry per point, in the order the points were written.

    `tag` indexes `tags`. `wall` is the writer's clock in seconds since 1970, NaN where a source has none.
    """

    tags: list[str] = field(default_factory=list)
    tag: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    step: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    value: np.ndarray = field(default_factory=lambda: np.zeros(0))
    wall: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.step)

    def take(self, chosen: np.ndarray | slice) -> Columns:
        return Columns(self.tags, self.tag[chosen], self.step[chosen], self.value[chosen], self.wall[chosen])

    def renumbered(self, numbers: dict[str, int]) -> Columns:
        """The same points with the tag numbers of `numbers`, which grows by the tags it lacks."""
        table = np.array([numbers.setdefault(tag, len(numbers)) for tag in self.tags], np.int32)
        return Columns(list(numbers), table[self.tag], self.step, self.value, self.wall)

    @classmethod
    def of_rows(cls, rows: Iterable[tuple[str, int, float, float]]) -> Columns:
        """Columns of (tag, step, value, wall) rows."""
        numbers: dict[str, int] = {}
        lists: tuple[list, list, list, list] = ([], [], [], [])
        for tag, step, value, wall in rows:
            for target, item in zip(lists, (numbers.setdefault(tag, len(numbers)), step, value, wall), strict=True):
                target.append(item)
        types = (np.int32, np.int64, float, float)
        return cls(list(numbers), *(np.array(column, kind) for column, kind in zip(lists, types, strict=True)))

    @classmethod
    def joined(cls, parts: list[Columns]) -> Columns:
        """Parts after one another, with one list of tags."""
        numbers: dict[str, int] = {}
        parts = [part.renumbered(numbers) for part in parts]
        if not parts:
            return cls()
        arrays = ([getattr(part, name) for part in parts] for name in ("tag", "step", "value", "wall"))
        return cls(list(numbers), *(np.concatenate(array) for array in arrays))
