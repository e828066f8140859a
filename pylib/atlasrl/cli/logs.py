"""Print the logs of a run."""

from __future__ import annotations

import click

from atlasrl.cli import command


@command
@click.argument("job")
@click.option("--attempt", type=click.IntRange(min=1), help="Which attempt. Default: the newest.")
@click.option("--stage", help="Only this one: node, inputs, preflight, ray, cast, train, export, launch.")
@click.option("--node", type=click.IntRange(min=0), help="Only this node.")
@click.option("--lines", "-n", type=click.IntRange(min=0), default=40, show_default=True, help="Last lines of each.")
@click.option("--follow", "-f", is_flag=True, help="Keep printing what is added.")
@click.option("--runs", "folder", type=click.Path(file_okay=False), help="Folder of runs.")
def main(job, attempt, stage, node, lines, follow, folder):
    """Print the logs of JOB: the id of any job of the run, the run's name, or its path."""
    from atlasrl import logs, progress
    from atlasrl.cli import runs_folder

    run = progress.find(job, runs_folder(folder))
    files = logs.select(run, attempt, stage, node)
    for file in files:
        click.echo(f"==> {file} <==")
        for line in logs.tail(file, lines):
            click.echo(line)
    if follow:
        for file, line in logs.added(files):
            click.echo(f"{file.stem}: {line}")


if __name__ == "__main__":
    main(prog_name="bin/logs")
