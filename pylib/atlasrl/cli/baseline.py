"""bin/baseline: keep the curves of a run as a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import click

from atlasrl.cli import CONTEXT, command


@click.group(context_settings=CONTEXT)
def main() -> None:
    """Keep the curves of runs as baselines that later runs are compared with.

    \b
    bin/baseline add gpu-dapo runs/gpu-seed1 runs/gpu-seed2 runs/gpu-seed3
    bin/compare runs/npu-1 --baseline gpu-dapo
    """


@command
@click.argument("name")
@click.argument("run", nargs=-1, required=True)
@click.option("--root", type=click.Path(file_okay=False), default="baselines", show_default=True)
@click.option("--allow-truncated", is_flag=True, help="Read damaged files up to the damage.")
def add(name: str, run: tuple[str, ...], root: str, allow_truncated: bool) -> None:
    """Store RUNs as the seeds of baseline NAME, with recipe, stack versions and git state."""
    from atlasrl.curves import load, store

    folder = store.add(name, [load.load(spec, allow_truncated) for spec in run], Path(root))
    for seed in store.describe(folder)["seeds"]:
        click.echo(f"{folder}/{seed['file']}: {seed['run']}, {seed['points']} points up to step {seed['last_step']}")


@command
@click.option("--root", type=click.Path(file_okay=False), default="baselines", show_default=True)
def show(root: str) -> None:
    """List the baselines and check their sums."""
    from atlasrl.curves import store

    for file in sorted(Path(root).glob("*/baseline.json")):
        seeds = store.load_seeds(str(file.parent))
        record = store.describe(file.parent)
        click.echo(
            f"{record['name']}: {len(seeds)} seeds, {seeds[0].last_step()} steps, added {record['added']}, intact"
        )


@command
@click.argument("name")
@click.option("--root", type=click.Path(file_okay=False), default="baselines", show_default=True)
def describe(name: str, root: str) -> None:
    """Print what made a baseline: recipe, versions, git state, checksums."""
    from atlasrl.curves import store

    store.load_seeds(name, Path(root))
    click.echo(json.dumps(store.describe(store.find(name, Path(root))), indent=1))


for verb, function in (("add", add), ("list", show), ("show", describe)):
    main.add_command(function, verb)


if __name__ == "__main__":
    main(prog_name="bin/baseline")
