"""What a check says: findings for people, facts for the comparison of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """One line of a report."""

    name: str
    state: State
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Fact:
    """A value that should be the same on every node, or (with `unique`) different."""

    name: str
    value: str | int | float
    unique: bool = False
    tolerance: float = 0.0
    """Numbers that differ by less are the same."""


@dataclass(frozen=True)
class Report:
    """One node, examined."""

    node: str
    device: str
    findings: list[Finding]
    facts: list[Fact]

    @property
    def failed(self) -> bool:
        return any(finding.state == "error" for finding in self.findings)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict) -> Report:
        findings = [Finding(**finding) for finding in tree["findings"]]
        return cls(tree["node"], tree["device"], findings, [Fact(**fact) for fact in tree["facts"]])


Check = Callable[..., Iterable[Finding | Fact]]


def ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def warn(name: str, what: str, remedy: str) -> Finding:
    return Finding(name, "warn", what, remedy)


def error(name: str, what: str, remedy: str) -> Finding:
    return Finding(name, "error", what, remedy)


def carried_out(name: str, check: Check, *arguments) -> Iterator[Finding | Fact]:
    """Run a check; one that breaks is a finding and hides no other."""
    try:
        yield from check(*arguments)
    except Exception as problem:
        yield error(name, f"the check broke: {type(problem).__name__}: {problem}", "report it with `--json`")
