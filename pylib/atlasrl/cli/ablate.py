"""Vary settings of a recipe, run each variant as a job, compare them on one page."""

from __future__ import annotations

import json
import sys

import click

from atlasrl.cli import command


@command
@click.argument("recipe")
@click.option("--vary", "vary", multiple=True, required=True, metavar="KEY=A,B", help="Values of a key; repeatable.")
@click.option("--grid", is_flag=True, help="Every combination. Default: one factor at a time, from the first values.")
@click.option("--name", help="Name of the ablation, a folder of runs. Default: <recipe>-ablation.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key in all variants; repeatable.")
@click.option("--nodes", "-N", type=click.IntRange(min=1), help="Nodes per run. Default: the recipe's.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices per node. Default: the recipe's.")
@click.option("--site", default="local", show_default=True, help="Cluster: a name in jobs/sites or a YAML file.")
@click.option(
    "--runs", "folder", type=click.Path(file_okay=False), help="Folder of runs. Default: the site's, or runs/."
)
@click.option("--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Jobs at a time.")
@click.option("--dry-run", is_flag=True, help="List the variants and stop.")
@click.option("--json", "as_json", is_flag=True, help="The variants and how they ended, as JSON.")
def main(recipe, vary, grid, name, changes, nodes, devices, site, folder, parallel, dry_run, as_json):
    """Run variants of RECIPE and compare them with the first.

    \b
    bin/ablate tiny --vary lr=2e-4,1e-4 --vary dapo.clip_high=0.28,0.2 --set steps=20
    bin/ablate qwen3-30b-a3b-dapo --vary use_mbridge=true,false --vary cp=1,2 --grid --site atlas --parallel 4

    The same command goes on where it was killed. Exit code: 0 every variant ended well, 1 one did not.
    """
    from pathlib import Path

    from atlasrl import ablate
    from atlasrl import site as sites
    from atlasrl.cli import runs_folder
    from atlasrl.rundir import check_name

    wanted = ablate.Ablation(
        recipe, ablate.parse_vary(list(vary)), "grid" if grid else "one", list(changes), nodes, devices
    )
    if dry_run:
        for variant in ablate.variants(wanted.vary, wanted.design):
            click.echo(f"{variant.name}: {' '.join(ablate.changes_of(wanted, variant))}")
        return
    cluster = sites.load(site)
    place = runs_folder(folder, cluster) / check_name(name or f"{Path(recipe).stem}-ablation")
    chosen = ablate.open_folder(place, wanted)
    ended = ablate.work(place, chosen, cluster, parallel, lambda line: click.echo(line, err=as_json))
    from atlasrl import ablation_page

    if as_json:
        click.echo(json.dumps({"folder": str(place), "variants": ended}, indent=1))
    else:
        click.echo("\n".join(ablation_page.rows(place, chosen)))
        click.echo(f"page: {place / 'ablation.html'}; runs: bin/status --runs {place}")
    sys.exit(0 if all(state == "done" for state in ended.values()) else 1)


if __name__ == "__main__":
    main(prog_name="bin/ablate")
