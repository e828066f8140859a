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


@verb
@click.argument("folder", type=FOLDER)
@click.option("--drop", multiple=True, metavar="REGEX", help="Drop tensors whose name matches. Repeatable.")
@click.option("--keep", multiple=True, metavar="REGEX", help="Keep what would be dropped. Repeatable.")
@click.option("--mtp", type=click.Choice(["keep", "drop"]), default="keep", show_default=True, help="The MTP layer.")
@click.option("--rebuild-index", is_flag=True, help="Assemble a lost index from the shards.")
@click.option("--target", type=FOLDER, help="Write the repaired checkpoint there instead of in place.")
@click.option("--undo", is_flag=True, help="Take the newest repair back, byte for byte.")
@click.option("--dry-run", is_flag=True, help="Print the changes, make none.")
def repair(folder, drop, keep, mtp, rebuild_index, target, undo, dry_run, as_json) -> int:
    """Mend index, total_size, numbering and headers; in place with a backup.

    \b
    ckpt repair Moonlight --dry-run
    ckpt repair Moonlight
    ckpt repair Moonlight --undo
    """
    from ckpt_tools import repair as repairing
    from ckpt_tools.checkpoint import read_checkpoint
    from ckpt_tools.repair_plan import Wishes, compile_patterns, plan_repair

    if undo:
        changes, remaining, backup = repairing.undo(folder), [], None
    else:
        wishes = Wishes(compile_patterns(drop), compile_patterns(keep), mtp == "drop", rebuild_index)
        plan = plan_repair(read_checkpoint(folder), wishes)
        backup = None if dry_run else repairing.repair(plan, target)
        changes, remaining = list(plan.changes), plan.remaining.errors
    if as_json:
        errors = [str(finding) for finding in remaining]
        say(json.dumps({"undone": undo, "changes": changes, "remaining": errors, "backup": backup and str(backup)}))
        return 1 if remaining else 0
    verdict = "undone" if undo else "would change" if dry_run else "changed"
    for change in changes:
        say(f"{verdict}: {change}")
    for finding in remaining:
        say(f"not a repair's to mend: {finding}")
    if not changes:
        say(f"{folder}: nothing to repair")
    elif backup:
        say(f"backup: {backup}; take it back with: ckpt repair {folder} --undo")
    return 1 if remaining else 0
