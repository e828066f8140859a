"""All runs in a table: state, attempt, step, reward, last checkpoint, age."""

from __future__ import annotations

import click

from atlasrl.cli import command


@command
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON list for machines.")
@click.option("--runs", "folder", type=click.Path(file_okay=False), help="Folder of runs.")
def main(names, as_json, folder):
    """Show the state of all runs, or of NAMES (run names, paths or job ids)."""
    import json

    from atlasrl import control, progress
    from atlasrl.cli import runs_folder
    from atlasrl.status import table, tree

    runs = runs_folder(folder)
    chosen = [progress.find(name, runs) for name in names]
    states = [progress.of(run) for run in chosen] or progress.of_all(progress.runs(runs))
    for run, state in zip(chosen or progress.runs(runs), states, strict=True):
        if state.is_open and (said := control.scheduler_says(run)):
            state.message = "; ".join(filter(None, (said, state.message)))
    if as_json:
        click.echo(json.dumps([tree(state) for state in states], indent=1))
    elif states:
        from rich.console import Console

        Console().print(table(states))
    else:
        click.echo(f"no runs in {runs}; start one with: make train")


if __name__ == "__main__":
    main(prog_name="bin/status")
