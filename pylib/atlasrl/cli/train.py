"""Start a run: plan it, make its directory, submit the job."""

from __future__ import annotations

import sys

import click

from atlasrl.cli import command


@command
@click.argument("recipe")
@click.option("--name", help="Name of the run. Default: the recipe's, or <recipe>-2, -3 … when that is taken.")
@click.option("--nodes", "-N", type=int, help="Number of nodes. Default: the recipe's.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices per node. Default: the recipe's.")
@click.option("--site", default="local", show_default=True, help="Cluster: a name in jobs/sites or a YAML file.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe; repeatable.")
@click.option(
    "--runs", "folder", type=click.Path(file_okay=False), help="Folder of runs. Default: the site's, or runs/."
)
@click.option("--follow/--detach", default=False, help="Watch until the end, or return with the job id (default).")
@click.option("--allow-oom-risk", is_flag=True, help="Start although the memory model says that it will not fit.")
@click.option(
    "--shrink", type=click.Choice(["cpu"]), help="Rehearse: a miniature of the recipe, a few steps, on this machine."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--json", "as_json", is_flag=True, help="The plan, or the job, as JSON.")
def main(recipe, name, nodes, devices, site, changes, folder, follow, allow_oom_risk, shrink, dry_run, as_json):
    """Train RECIPE: a name in jobs/recipes, or a YAML file.

    \b
    bin/train tiny --follow                      on this machine, watched
    bin/train tiny --nodes 2 --set steps=20      two Ray nodes on this machine
    bin/train deepseek-v3-671b-dapo --nodes 32 --site atlas --dry-run
    bin/train deepseek-v3-671b-dapo --shrink cpu --follow
    """
    from atlasrl import control, machine
    from atlasrl import plan as plans
    from atlasrl import recipe as recipes
    from atlasrl import shrink as shrinking
    from atlasrl import site as sites
    from atlasrl.cli import runs_folder, watch
    from atlasrl.rundir import RunDir, check_name

    cluster = sites.load(site)
    runs = runs_folder(folder, cluster)
    run = RunDir(runs / (check_name(name) if name else control.free_name(recipe, runs)))
    loaded = recipes.load(recipe, list(changes))
    small = shrinking.rehearse(loaded, run.input) if shrink else None
    if small:
        loaded = small.recipe
        for change in small.changes:
            click.echo(f"rehearsal: {change['key']}: {change['from']} -> {change['to']}: {change['reason']}", err=True)
    if cluster.kind == "local" and not dry_run and not small:
        model = loaded.model.path or run.input / "model"
        machine.check_memory(model, nodes or loaded.nodes, devices or loaded.devices_per_node)
    plan = plans.make(loaded, cluster, run, nodes=nodes, devices_per_node=devices, allow_oom_risk=allow_oom_risk)
    if dry_run:
        click.echo(plan.to_json() if as_json else control.preview(plan), nl=not as_json)
        return
    control.create(plan, recipe)
    if small:
        small.write(run.input)
    attempt, job = control.start(plan)
    if as_json:
        import json

        click.echo(json.dumps({"run": str(run.path), "attempt": attempt.number, "job": job}))
    else:
        click.echo(f"run {run.name}: job {job}, attempt {attempt.number}, in {run.path}")
    if follow:
        sys.exit(watch(attempt))


if __name__ == "__main__":
    main(prog_name="bin/train")
