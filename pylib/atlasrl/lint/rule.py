"""A rule and what it finds. Rules are data: an id, the words a person needs, and one function that looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from atlasrl.lint.case import Case

Level = Literal["error", "warning", "accepted"]
"""Accepted: an error that the recipe's `accept` names; it stops nothing."""


@dataclass(frozen=True)
class Rule:
    """`check` yields one sentence for each place where the rule is broken."""

    id: str
    level: Level
    reason: str
    """What happens otherwise."""
    source: str
    """Where that can be read: repository, file, issue, pull request, paper."""
    remedy: str
    check: Callable[[Case], Iterator[str]]


@dataclass(frozen=True)
class Finding:
    """One broken rule at one place."""

    rule: str
    level: Level
    found: str
    reason: str
    source: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level} {self.rule}: {self.found}; {self.reason}; {self.remedy} [{self.source}]"

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def rule(id: str, level: Level, *, reason: str, source: str, remedy: str) -> Callable[[Callable], Rule]:
    """Make the decorated check a Rule."""
    return lambda check: Rule(id, level, reason, source, remedy, check)
