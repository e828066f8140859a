"""Lint: known traps of a recipe, found before 256 devices are asked for. Pure; see docs/lint.md.

An error stops a start (unless the recipe's `accept` names its rule), a warning is shown. A rule of which the case knows
too little (no stack, no configuration of the model) stays silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atlasrl.lint.rule import Finding, Rule

if TYPE_CHECKING:
    from atlasrl.recipe import Recipe
    from atlasrl.stacks import Stack

__all__ = ["Finding", "Rule", "findings", "rules"]


def rules() -> tuple[Rule, ...]:
    """All rules, in the order in which a run would meet them."""
    from atlasrl.lint import environment, generation, gradients, sampling, saving, settings, split

    modules = (settings, split, gradients, sampling, generation, saving, environment)
    return tuple(each for module in modules for each in vars(module).values() if isinstance(each, Rule))


def findings(
    recipe: Recipe,
    nodes: int,
    devices: int,
    stack: Stack | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Judge a recipe on `nodes` nodes of `devices` devices; errors come first.

    Args:
        stack: the versions it will run on; absent: those the recipe names, or its device's default.
        environment: every variable of the job, as the plan has it; absent: of env/<device>.env.sh and the recipe.

    Raises:
        UsageFault: the recipe names a stack that does not exist.
    """
    from atlasrl import stacks
    from atlasrl.lint.case import gather

    case = gather(recipe, nodes, devices, stack or stacks.of_recipe(recipe), environment)
    found = [
        Finding(each.id, _level(each, recipe), sentence, each.reason, each.source, each.remedy)
        for each in rules()
        for sentence in each.check(case)
    ]
    return sorted(found, key=lambda finding: finding.level != "error")


def _level(rule: Rule, recipe: Recipe) -> str:
    return "accepted" if rule.level == "error" and rule.id in recipe.accept else rule.level
