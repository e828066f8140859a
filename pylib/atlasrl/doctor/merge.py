"""Several nodes side by side: what differs, and who."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from atlasrl.doctor.finding import Fact, Finding, Report, error

SHOWN = 4


def differences(reports: list[Report]) -> list[Finding]:
    """Facts in which nodes differ (or, for unique ones, agree). The majority is taken to be right."""
    return [*_differing(reports), *_shared(reports)]


def _differing(reports: list[Report]) -> Iterator[Finding]:
    values: dict[str, dict[str, Fact]] = defaultdict(dict)
    for report in reports:
        for fact in report.facts:
            if not fact.unique:
                values[fact.name][report.node] = fact
    for name, by_node in values.items():
        usual = Counter(fact.value for fact in by_node.values()).most_common(1)[0][0]
        odd = {node: fact.value for node, fact in by_node.items() if _differ(fact, usual)}
        if odd:
            said = ", ".join(f"{value} on {_names(nodes)}" for value, nodes in _grouped(odd).items())
            others = len(by_node) - len(odd)
            yield error(f"nodes differ: {name}", f"{said}; {usual} on {others} others", "make the nodes alike")


def _shared(reports: list[Report]) -> Iterator[Finding]:
    owners: dict[str | int | float, list[str]] = defaultdict(list)
    for report in reports:
        for fact in report.facts:
            if fact.unique:
                owners[fact.value].append(f"{report.node} ({fact.name})")
    for value, holders in owners.items():
        if len(holders) > 1:
            yield error("taken twice", f"{value}: {_names(holders)}", "each needs one of its own")


def _differ(fact: Fact, usual) -> bool:
    if isinstance(fact.value, (int, float)) and isinstance(usual, (int, float)):
        return abs(fact.value - usual) > fact.tolerance
    return fact.value != usual


def _grouped(odd: dict[str, str | int | float]) -> dict[str | int | float, list[str]]:
    groups = defaultdict(list)
    for node, value in odd.items():
        groups[value].append(node)
    return groups


def _names(nodes: list[str]) -> str:
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    return ", ".join(nodes[:SHOWN]) + more
