"""The verbs of bin/probe that hold two sides against each other."""

from __future__ import annotations

import json
import sys

import click

from atlasrl.cli import command


@command
@click.argument("left")
@click.argument("right")
@click.option("--all", "every", is_flag=True, help="Show differences without a known effect on accuracy too.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def configs(left, right, every, as_json):
    """Axis 1: compare the effective configurations of two runs.

    LEFT and RIGHT are run directories, launch scripts (*.sh, read and never run) or resolved verl configs
    (*.yaml, *.json). Exit code 1: a difference can move accuracy.

    \b
    bin/probe configs runs/npu-1 gpu-team/run_dapo_671b.sh
    bin/probe configs runs/npu-1 runs/npu-2 --all
    """
    from atlasrl.precision import configs as comparing
    from atlasrl.precision import effective

    sides = [effective.load(side) for side in (left, right)]
    found = comparing.differences(*sides)
    if as_json:
        click.echo(json.dumps(comparing.as_json(found), indent=1, default=str))
    else:
        click.echo(comparing.text(*sides, found, every))
    sys.exit(1 if any(each.effect.level in comparing.TELLING for each in found) else 0)


VERBS = {"configs": configs}
