"""The rules of a judgement, read from YAML and checked: unknown metrics, checks and limits are errors."""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from pathlib import Path

import yaml

from atlasrl.curves.checks import CHECKS
from atlasrl.errors import UsageFault

DEFAULT = Path(__file__).with_name("rules.yaml")


@dataclass(frozen=True)
class Rule:
    """One check of one metric: the value must be at most `at_most`, or inside `between`."""

    check: str
    at_most: float | None
    between: tuple[float, float] | None
    source: str


@dataclass(frozen=True)
class Rules:
    """`window` and `least_points` are numbers of points; `metrics` maps metric names to their rules."""

    window: int
    least_points: int
    metrics: dict[str, tuple[Rule, ...]]


@functools.lru_cache(8)
def load(file: Path = DEFAULT) -> Rules:
    """Read a rules file.

    Raises:
        UsageFault: no YAML, an unknown key or check (the nearest known one is named), or a limit that is no number.
    """
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as problem:
        raise UsageFault(f"cannot read the rules {file}: {problem.strerror}") from None
    except yaml.YAMLError as problem:
        raise UsageFault(f"{file} is not YAML: {' '.join(str(problem).split())}") from None
    tree = _mapping(tree, str(file), {"window", "least_points", "metrics"})
    metrics = tree.get("metrics")
    if not isinstance(metrics, dict):
        raise UsageFault(f"{file} has no `metrics:` mapping")
    return Rules(
        _count(tree.get("window", 5), f"{file}: window"),
        _count(tree.get("least_points", 5), f"{file}: least_points"),
        {str(name): tuple(_rule(r, f"{file}: {name}") for r in rules or []) for name, rules in metrics.items()},
    )


def _rule(entry: object, where: str) -> Rule:
    entry = _mapping(entry, where, {"check", "at_most", "between", "source"})
    check = entry.get("check")
    if check not in CHECKS:
        near = difflib.get_close_matches(str(check), CHECKS, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(CHECKS)}"
        raise UsageFault(f"{where}: unknown check {check}{hint}")
    at_most, between = entry.get("at_most"), entry.get("between")
    if (at_most is None) == (between is None):
        raise UsageFault(f"{where}: {check} needs either `at_most: NUMBER` or `between: [LOW, HIGH]`")
    if between is not None:
        if not (isinstance(between, list) and len(between) == 2 and all(map(_is_number, between))):
            raise UsageFault(f"{where}: {check}: `between` must be two numbers, found {between!r}")
        between = (float(between[0]), float(between[1]))
    elif not _is_number(at_most):
        raise UsageFault(f"{where}: {check}: `at_most` must be a number, found {at_most!r}")
    return Rule(check, None if at_most is None else float(at_most), between, str(entry.get("source", "")))


def _mapping(tree: object, where: str, known: set[str]) -> dict:
    if not isinstance(tree, dict):
        raise UsageFault(f"{where} is no mapping")
    for key in tree:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise UsageFault(f"{where}: unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))
    return tree


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageFault(f"{where} must be a whole number of points above 0, found {value!r}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
