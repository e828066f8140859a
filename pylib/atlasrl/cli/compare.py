"""bin/compare: is this run aligned with its baseline?"""

from __future__ import annotations

import click

from atlasrl.cli import command


@command
@click.argument("run", nargs=-1, required=True)
@click.option("-b", "--baseline", multiple=True, help="Stored baseline, or a run; repeat for several seeds.")
@click.option(
    "--x", "axis", type=click.Choice(["step", "samples", "tokens", "wall"]), default="step", show_default=True
)
@click.option("--steps", metavar="FIRST:LAST", help="Candidate steps to judge, for example 10:200 or 50:.")
@click.option(
    "--stride", type=click.FloatRange(min=0, min_open=True), default=1.0, help="Baseline steps per candidate step."
)
@click.option("--offset", type=float, default=0.0, help="Baseline step that meets candidate step 0.")
@click.option(
    "--metric", "changes", multiple=True, metavar="NAME=TAG", help="The tag of a metric, where no alias fits."
)
@click.option("--rules", type=click.Path(exists=True, dir_okay=False), help="Rules file instead of the defaults.")
@click.option("--allow-truncated", is_flag=True, help="Read damaged files up to the damage.")
@click.option("--details", is_flag=True, help="Show every check with its formula and the source of its limit.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write one HTML page that needs no network.")
@click.option("--png", type=click.Path(dir_okay=False), help="Write a picture for a chat.")
@click.option("--tensorboard", type=click.Path(file_okay=False), help="Write a logdir that overlays all runs.")
@click.option("--follow", is_flag=True, help="Judge again at every new step, until the run ends or Ctrl-C.")
@click.option("--hook", metavar="COMMAND", help="With --follow: run this when a check starts to fail.")
@click.option("--until-step", type=int, help="With --follow: stop after this step.")
def main(**options) -> None:
    """Judge RUN against a baseline, metric by metric.

    RUN is a run directory, its name below runs/, a TensorBoard folder, an event file, JSONL, CSV or a console log.
    Several RUNs are seeds of one candidate. NAME=PATH names a run; PATH,PATH joins the files of its attempts in order.

    \b
    bin/compare runs/npu-1 --baseline gpu-dapo
    bin/compare npu.jsonl -b gpu-1=gpu/seed1 -b gpu-2=gpu/seed2 --html compare.html
    bin/compare runs/npu-1 -b gpu-dapo --follow --hook 'bin/stop npu-1'

    Exit code: 0 aligned, 1 not aligned, 2 unreadable or nothing to compare.
    """
    from atlasrl.curves.compare import run_command

    raise SystemExit(run_command(**options))


if __name__ == "__main__":
    main(prog_name="bin/compare")
