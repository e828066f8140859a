"""Device memory: will a recipe fit, where does the memory go, which split is best, what did a profile measure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from atlasrl.cli import CONTEXT, command


class RecipeFirst(click.Group):
    """`bin/memory RECIPE` means `bin/memory fit RECIPE`."""

    def resolve_command(self, ctx: click.Context, args: list[str]):
        return super().resolve_command(ctx, args if args[0] in self.commands else ["fit", *args])


@click.group(cls=RecipeFirst, context_settings=CONTEXT)
def main():
    """Predict device memory, search splits, read profiles. `bin/memory RECIPE` is `bin/memory fit RECIPE`.

    \b
    bin/memory deepseek-v3-671b-dapo                    does it fit, where is it tightest, what would help
    bin/memory search deepseek-v3-671b-dapo --nodes 32  all splits that fit, cheapest first
    bin/memory profile FOLDER                           what Ascend's profiler measured
    """


def recipe_options(function):
    for option in reversed(
        (
            click.argument("recipe"),
            click.option("--nodes", "-N", type=click.IntRange(min=1), help="Number of nodes. Default: the recipe's."),
            click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key; repeatable."),
            click.option("--config", type=click.Path(path_type=Path), help="config.json of a model that is elsewhere."),
            click.option("--device-gib", type=click.FloatRange(min=1), help="Default: 60.96 (npu), 79.1 (cuda)."),
            click.option("--json", "as_json", is_flag=True, help="Machine-readable; sizes in bytes."),
        )
    ):
        function = option(function)
    return function


@command
@recipe_options
@click.option("--why", is_flag=True, help="Formula, reason and source of every term of the tightest phase.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a stacked-bar picture.")
def fit(recipe, nodes, changes, config, device_gib, as_json, why, html):
    """Predict every stage and phase of RECIPE; exit 1 when it does not fit.

    FSDP2 has no stages, and a CPU no device memory: the bytes that each worker holds are printed instead.
    """
    from atlasrl import recipe as recipes
    from atlasrl.memory import job, picture, report, verdict

    loaded = recipes.load(recipe, list(changes))
    if loaded.backend == "fsdp2" or (loaded.device == "cpu" and device_gib is None):
        world = (nodes or loaded.nodes) * loaded.devices_per_node
        click.echo(report.workers_text(recipe, loaded, job.architecture_of(loaded, config), world))
        return
    answer = verdict.of_recipe(loaded, nodes, config, device_gib)
    if html:
        from atlasrl.rundir import write_atomically

        write_atomically(html, picture.page(recipe, answer.prediction))
    if as_json:
        click.echo(json.dumps(report.as_json(recipe, answer.prediction, answer.remedies, answer.together), indent=1))
    else:
        click.echo(report.text(recipe, answer.prediction, answer.remedies, answer.together, explain=why))
    sys.exit(0 if answer.prediction.fits else 1)


@command
@recipe_options
@click.option("--limit", default=10, show_default=True, type=click.IntRange(min=1), help="Splits to print.")
def search(recipe, nodes, changes, config, device_gib, as_json, limit):
    """List the splits of RECIPE's devices that are legal and fit, cheapest first; exit 1 when there is none."""
    from atlasrl import recipe as recipes
    from atlasrl.memory import report, verdict

    ranking = verdict.ranked(recipes.load(recipe, list(changes)), nodes, config, device_gib)
    if as_json:
        click.echo(json.dumps([report.candidate_json(c) for c in ranking.found[:limit]], indent=1))
    else:
        click.echo(report.search_text(ranking.found, ranking.own, limit))
    sys.exit(0 if ranking.found else 1)


@command
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--phases", type=click.Path(exists=True, path_type=Path), help="phases.jsonl of the attempt.")
@click.option("--recipe", "recipe", help="Compare with the prediction for this recipe.")
@click.option("--nodes", "-N", type=click.IntRange(min=1), help="Number of nodes of the recipe.")
@click.option("--config", type=click.Path(path_type=Path), help="config.json of the recipe's model.")
@click.option("--top", default=5, show_default=True, type=click.IntRange(min=0), help="Holders at the peak to print.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable; sizes in bytes.")
def profile(folder, phases, recipe, nodes, config, top, as_json):
    """Read the memory tables of Ascend's profiler below FOLDER.

    FOLDER may also be a run that was trained with --set probe.memory=true (resident memory of each process in each
    phase, and on a CPU its workers beside what is predicted of them), or a PyTorch memory snapshot (.pickle, .pkl).

    Peaks of the process, HCCL and the framework, whether sleep released the weights, leaks, and who held memory at the
    peak. Tables of many gigabytes are streamed.
    """
    from atlasrl.memory import profile as profiles
    from atlasrl.memory import report, snapshot

    if (folder / "plan.json").is_file():
        from atlasrl.memory import profiled_run
        from atlasrl.rundir import RunDir

        click.echo("\n".join(profiled_run.lines(RunDir(folder), config)))
        return
    if folder.suffix in {".pickle", ".pkl"}:
        click.echo(report.snapshot_text(snapshot.read(folder), top))
        return
    prediction = None
    if recipe:
        from atlasrl import recipe as recipes
        from atlasrl.memory import verdict

        prediction = verdict.of_recipe(recipes.load(recipe), nodes, config).prediction
    found = profiles.read(folder, profiles.read_marks(phases) if phases else profiles.NO_MARKS)
    if as_json:
        click.echo(json.dumps([profiles.as_json(each) for each in found], indent=1))
    else:
        click.echo("\n".join(line for each in found for line in profiles.lines(each, prediction, top)))


for verb in (fit, search, profile):
    main.add_command(verb)


if __name__ == "__main__":
    main(prog_name="bin/memory")
