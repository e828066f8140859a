"""Known traps of a recipe, and DAPO's arithmetic, before anything starts."""

from __future__ import annotations

import json
import sys

import click

from atlasrl.cli import command


@command
@click.argument("recipe", required=False)
@click.option("--nodes", "-N", type=click.IntRange(min=1), help="Number of nodes. Default: the recipe's.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices per node. Default: the recipe's.")
@click.option("--stack", help="Versions: a name in env/stacks or a YAML file. Default: the recipe's, or its device's.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe; repeatable.")
@click.option("--prompts", type=click.IntRange(min=1), help="Prompts of the training data, where it is not here.")
@click.option("--step-minutes", type=click.FloatRange(min=0, min_open=True), help="Measured time of a step.")
@click.option("--rules", "list_rules", is_flag=True, help="List all rules and stop.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def main(recipe, nodes, devices, stack, changes, prompts, step_minutes, list_rules, as_json):
    """Check RECIPE against the known traps of its stack; exit 1 when there is an error.

    \b
    bin/lint deepseek-v3-671b-dapo --nodes 32
    bin/lint deepseek-v3-671b-dapo --stack a2-article
    bin/lint --rules
    """
    from atlasrl import lint, stacks
    from atlasrl import recipe as recipes
    from atlasrl.errors import UsageFault
    from atlasrl.lint import arithmetic, report

    if list_rules:
        click.echo(json.dumps(report.rules_json(), indent=1) if as_json else report.rules_text())
        return
    if recipe is None:
        raise UsageFault("which recipe? bin/lint RECIPE, or bin/lint --rules")
    loaded = recipes.load(recipe, list(changes))
    chosen = stacks.load(stack) if stack else stacks.of_recipe(loaded)
    nodes, devices = nodes or loaded.nodes, devices or loaded.devices_per_node
    found = lint.findings(loaded, nodes, devices, chosen)
    numbers = arithmetic.of_recipe(loaded, nodes, devices, prompts, step_minutes)
    name = stack or loaded.stack or stacks.DEFAULT.get(loaded.device)
    if as_json:
        click.echo(json.dumps(report.as_json(recipe, name, found, numbers), indent=1))
    else:
        click.echo(
            report.text(f"{recipe} on {nodes} x {devices} {loaded.device}, stack {name or '(none)'}", found, numbers)
        )
    sys.exit(1 if any(each.level == "error" for each in found) else 0)


if __name__ == "__main__":
    main(prog_name="bin/lint")
