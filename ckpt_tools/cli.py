"""The command line: parse, call one function, print. Heavy imports wait until a verb runs."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import click

from ckpt_tools.errors import Fault

FOLDER = click.Path(path_type=Path)


def printable(text: str) -> str:
    """Text from a foreign file made safe for a terminal: control characters are spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    click.echo(printable(text))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def main() -> None:
    """Checkpoint tools: cast, verify, repair, diff, shrink, prune.

    Exit codes: 0 proven right, 1 found wrong, 2 usage.
    """


def verb(function):
    """Register a command that has --json, prints a Fault as one line, and exits with its code."""

    @click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
    @functools.wraps(function)
    def run(**options):
        try:
            code = function(**options)
        except Fault as fault:
            click.echo(f"error: {printable(str(fault))}", err=True)
            sys.exit(fault.exit_code)
        sys.exit(code or 0)

    return main.command(name=function.__name__.rstrip("_").replace("_", "-"))(run)


@verb
@click.argument("source", type=FOLDER)
@click.argument("target", type=FOLDER)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes on this machine.")
@click.option("--ray", is_flag=True, help="Spread the shards over the running Ray cluster (RAY_ADDRESS).")
@click.option("--mtp", type=click.Choice(["keep", "drop"]), default="keep", show_default=True, help="The MTP layer.")
@click.option("--keep-buffers", is_flag=True, help="Keep stored rotary_emb.inv_freq and the like.")
@click.option("--read-again", is_flag=True, help="Prove a complete target by reading all of it.")
@click.option("--dry-run", is_flag=True, help="Print the plan, write nothing.")
def cast(source, target, workers, ray, mtp, keep_buffers, read_again, dry_run, as_json) -> int:
    """Cast an FP8 checkpoint to BF16, resumable, proven at the end.

    \b
    ckpt cast DeepSeek-V3 DeepSeek-V3-BF16 --mtp drop --workers 16
    """
    from ckpt_tools import cast as casting
    from ckpt_tools.checkpoint import read_checkpoint
    from ckpt_tools.plan import plan_cast
    from ckpt_tools.progress import showing

    if dry_run:
        plan = plan_cast(read_checkpoint(source), target, mtp, keep_buffers)
        facts = {"shards": len(plan.jobs), "bytes": plan.size, "dropped": plan.dropped, "added": plan.added}
        say(json.dumps(facts, indent=2) if as_json else "\n".join(casting.plan_lines(plan)))
        return 0
    with showing("cast") as progress:
        result = casting.cast(source, target, workers, "auto" if ray else None, mtp, keep_buffers, progress, read_again)
    say(json.dumps(result.as_dict(), indent=2) if as_json else "\n".join(casting.describe(result)))
    return 0


@verb
@click.argument("folder", type=FOLDER)
def verify(folder, as_json) -> int:
    """Check index, shards, sizes and config against each other; reads headers only.

    \b
    ckpt verify DeepSeek-V3-BF16
    """
    from ckpt_tools.report import show
    from ckpt_tools.verify import verify as check

    report = check(folder)
    if as_json:
        click.echo(report.as_json())
    else:
        show(report)
    return report.exit_code
