"""bin/probe: find why a run differs from its baseline, one axis at a time."""

from __future__ import annotations

import click

from atlasrl.cli import CONTEXT, probe_compare, probe_run


@click.group(context_settings=CONTEXT)
def main() -> None:
    """Look into a run: data, weights, structure, devices, answers. Each verb answers one question.

    Exit code: 0 nothing found, 1 found, 2 usage.
    """


VERBS: dict[str, click.Command] = {**probe_compare.VERBS, **probe_run.VERBS}
"""Verb -> command, in the order in which an engineer asks."""

for verb, function in VERBS.items():
    main.add_command(function, verb)


if __name__ == "__main__":
    main(prog_name="bin/probe")
