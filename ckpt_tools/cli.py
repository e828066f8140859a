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
@click.option("--deep", is_flag=True, help="Read the data: NaN, infinity, stored checksums.")
@click.option("--write-checksums", is_flag=True, help="With --deep: store the checksums for later checks.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Threads that read with --deep.")
@click.option("--mbridge", is_flag=True, help="Also predict what mbridge would not save after training.")
@click.option("--dry-run", is_flag=True, help="The check writes nothing anyway, except with --write-checksums.")
def verify(folder, deep, write_checksums, workers, mbridge, dry_run, as_json) -> int:
    """Check index, shards, sizes and config against each other; reads headers only.

    A folder of training checkpoints (global_step_*) is checked step by step.

    \b
    ckpt verify DeepSeek-V3-BF16
    ckpt verify DeepSeek-V3-BF16 --deep --write-checksums
    ckpt verify runs/night/checkpoints
    """
    from ckpt_tools.errors import UsageFault
    from ckpt_tools.progress import showing
    from ckpt_tools.report import show

    if write_checksums and not deep:
        raise UsageFault("--write-checksums needs --deep, which computes them")
    if not folder.is_dir():
        raise UsageFault(f"{folder}: no such folder; give the folder that holds the *.safetensors files")
    from ckpt_tools.training import is_training_folder, verify_training
    from ckpt_tools.verify import verify as check

    training = is_training_folder(folder)
    if training and (deep or mbridge):
        raise UsageFault("--deep and --mbridge need a model's folder, such as global_step_N/actor/huggingface")
    report = verify_training(folder) if training else check(folder)
    if mbridge:
        from ckpt_tools.mbridge import add_predictions

        add_predictions(folder, report)
    if deep and not report.errors:
        from ckpt_tools.deep import verify_data

        with showing("read", quiet=as_json) as progress:
            verify_data(folder, report, workers, write_checksums and not dry_run, progress)
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


@verb
@click.argument("first", type=FOLDER)
@click.argument("second", type=FOLDER, required=False)
@click.option("--headers-only", is_flag=True, help="Compare keys, shapes and dtypes; read no data.")
@click.option("--tolerance", type=click.FloatRange(0), default=0.0, help="Mean relative change that passes.")
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="Changed tensors to print.")
@click.option("--weights-digest", is_flag=True, help="Print one line per tensor of FIRST, to compare machines by text.")
@click.option("--dry-run", is_flag=True, help="Say how much would be read.")
def diff(first, second, headers_only, tolerance, limit, weights_digest, dry_run, as_json) -> int:
    """Compare two checkpoints; print differences only.

    \b
    ckpt diff base merged --tolerance 0.01
    ckpt diff model --weights-digest > here.txt    # then compare with there.txt
    """
    from ckpt_tools import diff as differing
    from ckpt_tools.errors import UsageFault
    from ckpt_tools.files import human
    from ckpt_tools.progress import showing

    if dry_run:
        from ckpt_tools.checkpoint import read_checkpoint

        total = sum(read_checkpoint(folder).nbytes for folder in (first, second) if folder)
        say(json.dumps({"read_bytes": total}) if as_json else f"would read {human(total)}")
        return 0
    if weights_digest:
        with showing("digest", quiet=as_json) as progress:
            lines = list(differing.digest_lines(first, 2, progress))
        say(json.dumps(lines, indent=2) if as_json else "\n".join(lines))
        return 0
    if second is None:
        raise UsageFault("give a second folder to compare with, or --weights-digest")
    with showing("diff", quiet=as_json) as progress:
        result = differing.diff(first, second, not headers_only, progress)
    if as_json:
        say(json.dumps(result.as_dict(), indent=2))
    else:
        say("\n".join(differing.describe(result, first, second, limit, tolerance)))
    return result.exit_code(tolerance)


@verb
@click.argument("source", type=FOLDER)
@click.argument("target", type=FOLDER)
@click.option("--dense", type=click.IntRange(0), help="Dense layers to keep (default: all).")
@click.option("--moe", type=click.IntRange(0), help="MoE layers to keep (default: all).")
@click.option("--experts", type=click.IntRange(1), help="Routed experts per layer to keep (default: all).")
@click.option("--dry-run", is_flag=True, help="Print the plan, write nothing.")
def shrink(source, target, dense, moe, experts, dry_run, as_json) -> int:
    """Cut a model down to its first layers, for trials on few devices.

    \b
    ckpt shrink DeepSeek-V3-BF16 DeepSeek-V3-5L --dense 3 --moe 2
    """
    from ckpt_tools import shrink as shrinking
    from ckpt_tools.checkpoint import read_checkpoint
    from ckpt_tools.files import human
    from ckpt_tools.progress import showing

    if dry_run:
        plan = shrinking.plan_shrink(read_checkpoint(source.absolute()), target.absolute(), dense, moe, experts)
    else:
        with showing("shrink", quiet=as_json) as progress:
            plan = shrinking.shrink(source, target, dense, moe, experts, progress)
    size = sum(job.size for job in plan.jobs)
    if as_json:
        say(json.dumps({"shards": len(plan.jobs), "bytes": size, "changes": plan.notes}, indent=2))
    else:
        say("\n".join([f"{target}: {len(plan.jobs)} shards, {human(size)}", *plan.notes]))
    return 0


@verb
@click.argument("root", type=FOLDER)
@click.option("--keep", type=int, default=2, show_default=True, help="Whole steps to keep, the newest first.")
@click.option("--pin", type=int, multiple=True, metavar="STEP", help="A step that always stays. Repeatable.")
@click.option("--broken", is_flag=True, help="Also remove broken steps older than the newest whole one.")
@click.option("--apply", is_flag=True, help="Remove; without it only the verdicts are printed.")
@click.option("--dry-run", is_flag=True, help="Print the verdicts, remove nothing (the default).")
def prune(root, keep, pin, broken, apply, dry_run, as_json) -> int:
    """Remove old training checkpoints (global_step_*); a trial unless --apply is given.

    The newest whole step, pinned steps, and steps that hold a file PINNED always stay.

    \b
    ckpt prune runs/night/checkpoints --keep 2 --pin 100
    ckpt prune runs/night/checkpoints --keep 2 --pin 100 --apply
    """
    from ckpt_tools import prune as pruning
    from ckpt_tools.files import human

    really = apply and not dry_run
    verdicts = pruning.prune(root, keep, pin, broken, really)
    freed = sum(verdict.step.size for verdict in verdicts if not verdict.stays)
    if as_json:
        steps = [{"step": v.step.number, "stays": v.stays, "reason": v.reason, "bytes": v.step.size} for v in verdicts]
        say(json.dumps({"removed": really, "freed_bytes": freed, "steps": steps}, indent=2))
        return 0
    for verdict in verdicts:
        word = "stays" if verdict.stays else "removed" if really else "would go"
        say(f"{word:<9} {verdict.step.path.name:<20} {human(verdict.step.size):>10}  {verdict.reason}")
    say(f"{human(freed)} {'freed' if really else 'would be freed'}" + ("" if really else "; add --apply to remove"))
    return 0
