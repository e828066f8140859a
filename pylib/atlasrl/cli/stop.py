"""End a run cleanly."""

from __future__ import annotations

import click

from atlasrl.cli import command


@command
@click.argument("job")
@click.option("--save", is_flag=True, help="Write a checkpoint first, at the end of the step that is running.")
@click.option("--deadline", type=float, default=300, show_default=True, help="Seconds before the job is cancelled.")
@click.option("--runs", "folder", type=click.Path(file_okay=False), help="Folder of runs.")
def main(job, save, deadline, folder):
    """End JOB: the id of any job of the run, the run's name, or its path."""
    from atlasrl import control, progress
    from atlasrl.cli import runs_folder

    run = progress.find(job, runs_folder(folder))
    words = control.stop(run, save=save, deadline=deadline)
    now = progress.of(run)
    click.echo(f"run {run.name} ended at step {now.step}: {words}; last checkpoint: {now.checkpoint or 'none'}")
    click.echo(f"continue with: bin/resume {run.name}" + ("" if now.checkpoint else " --step 0"))


if __name__ == "__main__":
    main(prog_name="bin/stop")
