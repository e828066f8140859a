"""What a check found: findings with a name, a place and a remedy; and how they are printed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

import click

ERROR, WARNING = "error", "warning"
SHOWN_PER_KIND = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect. `kind` is its name in docs/ckpt.md, `where` a file or tensor."""

    level: str
    kind: str
    where: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.problem}; {self.remedy}"


@dataclass(slots=True)
class Report:
    """Findings plus the facts that were counted on the way (shards, tensors, bytes read, dtypes)."""

    path: str
    facts: dict[str, object] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def error(self, kind: str, where: str, problem: str, remedy: str) -> None:
        self.findings.append(Finding(ERROR, kind, where, problem, remedy))

    def warn(self, kind: str, where: str, problem: str, remedy: str) -> None:
        self.findings.append(Finding(WARNING, kind, where, problem, remedy))

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == ERROR]

    @property
    def exit_code(self) -> int:
        return 1 if self.errors else 0

    def kinds(self) -> Counter:
        return Counter(finding.kind for finding in self.findings)

    def as_json(self) -> str:
        content = {
            "path": self.path,
            "ok": not self.errors,
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(content, indent=2, ensure_ascii=False)


def show(report: Report) -> None:
    """Print facts, then at most ten findings of each kind, then the verdict."""
    for name, value in report.facts.items():
        click.echo(f"{name:<14} {value}")
    shown: Counter = Counter()
    for finding in report.findings:
        shown[finding.kind] += 1
        if shown[finding.kind] <= SHOWN_PER_KIND:
            click.echo(str(finding))
    for kind, count in shown.items():
        if count > SHOWN_PER_KIND:
            click.echo(f"… and {count - SHOWN_PER_KIND} more of {kind} (--json lists all)")
    warnings = len(report.findings) - len(report.errors)
    verdict = f"{len(report.errors)} errors, {warnings} warnings" if report.findings else "no defects found"
    click.echo(f"{report.path}: {verdict}")
