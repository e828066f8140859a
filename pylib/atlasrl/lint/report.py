"""What lint found, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict

from atlasrl.lint import Finding, rules
from atlasrl.lint.arithmetic import Arithmetic


def text(title: str, found: list[Finding], numbers: Arithmetic) -> str:
    """For a person: the arithmetic, then each finding in a few lines, errors first."""
    lines = [title, "", *numbers.lines(), ""]
    for each in found:
        lines += [f"{each.level} {each.rule}: {each.found}", f"    why     {each.reason}"]
        lines += [f"    do      {each.remedy}", f"    source  {each.source}"]
    errors = sum(each.level == "error" for each in found)
    accepted = sum(each.level == "accepted" for each in found)
    counts = f"{errors} error(s), {len(found) - errors - accepted} warning(s)"
    return "\n".join([*lines, f"{len(rules())} rules: {counts}" + (f", {accepted} accepted" if accepted else "")])


def as_json(recipe: str, stack: str | None, found: list[Finding], numbers: Arithmetic) -> dict:
    return {
        "recipe": recipe,
        "stack": stack,
        "findings": [each.as_json() for each in found],
        "arithmetic": asdict(numbers),
    }


def rules_text() -> str:
    lines = [f"{each.level:8} {each.id:26} {each.reason}\n{'':36}{each.remedy} [{each.source}]" for each in rules()]
    return "\n".join([*lines, f"{len(rules())} rules"])


def rules_json() -> list[dict]:
    names = ("id", "level", "reason", "source", "remedy")
    return [{name: getattr(each, name) for name in names} for each in rules()]
