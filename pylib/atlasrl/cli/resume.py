"""Continue a run from its newest complete checkpoint."""

from __future__ import annotations

import sys

import click

from atlasrl.cli import command


@command
@click.argument("job")
@click.option(
    "--step", type=click.IntRange(min=0), help="Checkpoint to continue from; 0 starts again. Default: newest."
)
@click.option("--steps", type=click.IntRange(min=1), help="New total number of steps. Default: the recipe's.")
@click.option("--nodes", type=click.IntRange(min=1), help="Another number of nodes. Megatron only.")
@click.option(
    "--set", "split", multiple=True, metavar="parallel.KEY=SIZE", help="Another split of the model; repeatable."
)
@click.option("--explain", is_flag=True, help="Say what would be loaded, from which files, and stop.")
@click.option("--runs", "folder", type=click.Path(file_okay=False), help="Folder of runs.")
@click.option("--follow/--detach", default=False, help="Watch until the end, or return with the job id (default).")
def main(job, step, steps, nodes, split, explain, folder, follow):
    """Continue JOB: the id of any job of the run, the run's name, or its path.

    \b
    bin/resume 4711               the run that job 4711 belonged to
    bin/resume tiny --step 20     from a certain checkpoint
    bin/resume tiny --explain     what is there, what would be loaded
    bin/resume tiny --nodes 4     on more nodes; other engines sample other answers
    """
    from atlasrl import control, progress
    from atlasrl.cli import runs_folder, watch

    run = progress.find(job, runs_folder(folder))
    plan, checkpoint, words = control.resume(run, step, steps, nodes, split)
    click.echo(f"run {run.name} continues {words}")
    if explain:
        from atlasrl import checkpoints

        click.echo("\n".join(checkpoints.explain(run)))
        return
    attempt, job_id = control.start(plan, checkpoint)
    click.echo(f"run {run.name}: job {job_id}, attempt {attempt.number}")
    if follow:
        sys.exit(watch(attempt))


if __name__ == "__main__":
    main(prog_name="bin/resume")
