"""The verbs of bin/probe that hold two sides against each other."""

from __future__ import annotations

import json
import sys

import click

from atlasrl.cli import command


@command
@click.argument("left")
@click.argument("right")
@click.option("--all", "every", is_flag=True, help="Show differences without a known effect on accuracy too.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def configs(left, right, every, as_json):
    """Axis 1: compare the effective configurations of two runs.

    LEFT and RIGHT are run directories, launch scripts (*.sh, read and never run) or resolved verl configs
    (*.yaml, *.json). Exit code 1: a difference can move accuracy.

    \b
    bin/probe configs runs/npu-1 gpu-team/run_dapo_671b.sh
    bin/probe configs runs/npu-1 runs/npu-2 --all
    """
    from atlasrl.precision import configs as comparing
    from atlasrl.precision import effective

    sides = [effective.load(side) for side in (left, right)]
    found = comparing.differences(*sides)
    if as_json:
        click.echo(json.dumps(comparing.as_json(found), indent=1, default=str))
    else:
        click.echo(comparing.text(*sides, found, every))
    sys.exit(1 if comparing.telling(found) else 0)


@command
@click.argument("answers")
@click.argument("left")
@click.argument("right")
@click.option("--step", type=click.IntRange(min=1), help="Of a run, only this recorded step.")
@click.option("--data-source", default="unknown", show_default=True, help="For answers that name none.")
@click.option("--python-left", help="Interpreter for LEFT. Default: this one.")
@click.option("--python-right", help="Interpreter for RIGHT. Default: this one.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True, help="Limit per answer.")
@click.option("--limit", type=click.IntRange(min=0), default=10, show_default=True, help="Disagreements to print.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def scoring(answers, left, right, step, data_source, python_left, python_right, seconds, limit, as_json):
    """Axis 6: score the same ANSWERS with two reward rules.

    ANSWERS is a JSONL file (solution_str or output, ground_truth or gts), a folder of them (verl's
    trainer.rollout_data_dir), or a run that recorded its rollouts. LEFT and RIGHT are FILE.py, FILE.py:function, or
    verl for verl's own rules. Each runs in a process of its own. Exit code 1: they disagree.

    \b
    bin/probe scoring runs/npu-1 jobs/inputs/tiny/reward.py gpu-team/reward.py
    bin/probe scoring dump/ verl gpu-team/reward.py:score --python-right /gpu/venv/bin/python
    """
    from pathlib import Path

    from atlasrl.precision import answers as reading
    from atlasrl.precision import scoring as comparing

    rules = [comparing.Rule.parse(*each) for each in ((left, python_left), (right, python_right))]
    given = reading.read(Path(answers), step, data_source)
    found = comparing.compare(given, *rules, seconds)
    if as_json:
        click.echo(json.dumps(comparing.as_json(len(given), found), indent=1))
    else:
        click.echo(comparing.text(len(given), found, (left, right), limit))
    sys.exit(1 if found else 0)


@command
@click.argument("run", type=click.Path(exists=True, file_okay=False))
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--step", type=click.IntRange(min=1), default=1, show_default=True, help="Recorded step to run over.")
@click.option("--rows", type=click.IntRange(min=1), default=8, show_default=True, help="Answers of that step.")
@click.option("--model", help="Hugging Face folder. Default: the model that RUN started from.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda:0 or npu:0.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: the recipe's.")
@click.option("--limit", type=click.IntRange(min=1), default=256, show_default=True, help="Largest dump, in MB.")
@click.option("--sample", type=click.IntRange(min=1), default=256, show_default=True, help="Elements kept per tensor.")
@click.option("--tool", type=click.Choice(["atlasrl", "msprobe"]), default="atlasrl", show_default=True)
def dump(run, folder, step, rows, model, device, dtype, limit, sample, tool):
    """Axis 4: dump what each module makes of RUN's recorded answers.

    The run needs `rollout.record: true`. One device holds the model: cut a large one first (bin/ckpt shrink). Dumps of
    two machines are compared with bin/probe stack.

    \b
    bin/probe dump runs/npu-1 /tmp/npu --device npu:0
    bin/probe dump runs/npu-1 /tmp/gpu --device cuda:0          on the other machine
    """
    from pathlib import Path

    from atlasrl.precision.dumping import dump_run
    from atlasrl.rundir import RunDir

    chosen = {"step": step, "rows": rows, "model": model, "device": device, "dtype": dtype, "tool": tool}
    bounds = {"limit": limit << 20, "sample": sample}
    click.echo(f"dump: {dump_run(RunDir(run), Path(folder), **chosen, **bounds)}")


@command
@click.argument("left", type=click.Path(exists=True, file_okay=False))
@click.argument("right", type=click.Path(exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def stack(left, right, as_json):
    """Axis 4: find the first module that makes two dumps differ.

    LEFT and RIGHT are folders of bin/probe dump, or of msprobe (level L0, task statistics). Exit code 1: one was found.
    """
    from dataclasses import asdict
    from pathlib import Path

    from atlasrl.precision import bisect, dumps

    sides = [dumps.read(Path(side)) for side in (left, right)]
    finding = bisect.compare(*sides)
    click.echo(json.dumps(asdict(finding), indent=1) if as_json else bisect.text(*sides, finding))
    sys.exit(1 if finding.culprit else 0)


@command
@click.argument("run", type=click.Path(exists=True, file_okay=False))
@click.argument("baseline", type=click.Path(exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def auto(run, baseline, as_json):
    """Walk all six axes over what RUN and BASELINE recorded, and name the cause.

    Nothing is run; what was not recorded is said. Record with rollout.record, probe.syncs: 3, bin/probe stress and
    bin/probe dump RUN RUN/stack. Exit code 1: a cause was found.
    """
    from atlasrl.precision import auto as walking
    from atlasrl.rundir import RunDir

    sides = [RunDir(side) for side in (run, baseline)]
    axes = walking.walk(*sides)
    click.echo(json.dumps(walking.as_json(axes), indent=1) if as_json else walking.text(*sides, axes))
    sys.exit(1 if walking.cause(axes) else 0)


VERBS = {"auto": auto, "configs": configs, "dump": dump, "stack": stack, "scoring": scoring}
