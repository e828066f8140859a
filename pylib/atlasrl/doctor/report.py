"""Reports of nodes as text: what is wrong, what to do, the same thing once for all nodes that have it."""

from __future__ import annotations

from collections import defaultdict

from atlasrl.doctor.finding import Finding, Report

SHOWN = 4


def text(reports: list[Report], between: list[Finding], show_all: bool = False) -> str:
    """One line a finding; on several nodes one line for all nodes that say the same."""
    nodes = defaultdict(list)
    for report in reports:
        for finding in report.findings:
            if show_all or finding.state != "ok":
                nodes[finding].append(report.node)
    lines = [_line(finding, where if len(reports) > 1 else []) for finding, where in nodes.items()]
    lines += [_line(finding, []) for finding in between]
    return "\n".join([*lines, _summary(reports, between)])


def as_dict(reports: list[Report], between: list[Finding]) -> dict:
    """For machines; `bin/doctor --merge` reads it again."""
    return {
        "ok": not between and not any(report.failed for report in reports),
        "nodes": [report.to_dict() for report in reports],
        "differences": [finding.__dict__ for finding in between],
    }


def _line(finding: Finding, where: list[str]) -> str:
    names = ", ".join(where[:SHOWN]) + (f" and {len(where) - SHOWN} more" if len(where) > SHOWN else "")
    return f"{finding.state:5} {f'[{names}] ' if where else ''}{finding}"


def _summary(reports: list[Report], between: list[Finding]) -> str:
    states = [finding.state for report in reports for finding in report.findings]
    who = reports[0].node if len(reports) == 1 else f"{len(reports)} nodes, {len(between)} differences between them"
    return f"{who}: {states.count('ok')} ok, {states.count('warn')} warnings, {states.count('error')} errors"
