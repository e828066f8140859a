"""The verbs of bin/probe that look into one run, one model or the devices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from atlasrl.cli import command, runs_folder


def _run(name: str, runs: str | None):
    """The run of a name below the runs folder, or of a path."""
    from atlasrl.errors import UsageFault
    from atlasrl.rundir import RunDir

    path = Path(name) if Path(name).is_dir() else runs_folder(runs) / name
    if not path.is_dir():
        raise UsageFault(
            f"no run {name!r}: no folder of that name, and none in {path.parent}; bin/status lists the runs"
        )
    return RunDir(path)


of_runs = click.option("--runs", type=click.Path(file_okay=False), help="Folder of runs, where RUN is a name.")


@command
@click.argument("run")
@click.argument("baseline")
@of_runs
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def data(run, baseline, runs, as_json):
    """Axis 2: did two runs see the same prompts, in the same order, as the same tokens?

    Compares the first, middle and last ten steps that both have. Exit code 1: they differ.

    \b
    bin/probe data runs/npu-1 runs/gpu-1
    """
    from atlasrl.precision import data as axis

    sides = [_run(name, runs) for name in (run, baseline)]
    ours, theirs = (axis.samples(side) for side in sides)
    seeds = [axis.seed_of(side) for side in sides]
    same_seed = None in seeds or seeds[0] == seeds[1]
    found = axis.compare(ours, theirs, same_seed=same_seed)
    if as_json:
        click.echo(json.dumps({"same_seed": same_seed, "differences": [vars(each) for each in found]}, indent=1))
    else:
        if not same_seed:
            click.echo(f"seeds {seeds[0]} and {seeds[1]}: another order is meant, only prompts and tokens are compared")
        for window in axis.compare_windows(ours, theirs) if same_seed else ():
            click.echo(str(window))
        for each in found or ["no difference in the data"]:
            click.echo(str(each))
    sys.exit(1 if found else 0)


@command
@click.argument("run")
@of_runs
@click.option("--attempt", type=click.IntRange(min=1), help="Default: the newest that was watched.")
@click.option(
    "--tensor", "patterns", multiple=True, metavar="TEXT", help="Show the digests of tensors whose name has TEXT."
)
def weights(run, runs, attempt, patterns):
    """Did the weights of each sync reach the rollout?

    Reads the digests that a run with `probe.syncs: N` in its recipe left: at init, sent, and after each sync. Exit
    code 1: a tensor did not come over, or a derived one is stale.

    \b
    bin/train tiny --set probe.syncs=3 --name watched
    bin/probe weights watched --tensor kv_b_proj
    """
    from atlasrl.precision import weights as axis

    found_run = _run(run, runs)
    watched = [a for a in found_run.attempts() if a.weights.is_dir()]
    chosen = found_run.attempt(attempt) if attempt else (watched or [found_run.attempt(1)])[-1]
    workers = axis.read(chosen.weights)
    found = list(axis.disagreements(workers))
    for worker, syncs in workers.items():
        names = [n for n in syncs[0]["sent"] | syncs[0]["after"] if any(text in n for text in patterns)]
        for line in axis.lines_of(syncs, names):
            click.echo(line)
        of_worker = list(axis.suspicions(syncs))
        click.echo(f"{worker}: {len(syncs)} syncs of {len(syncs[0]['sent'])} tensors, {len(of_worker)} suspicious")
        if unmoved := axis.unmoved(syncs):
            click.echo(f"    never moved by training: {', '.join(unmoved[:5])}{' …' if len(unmoved) > 5 else ''}")
        found += of_worker
    for suspicion in found:
        click.echo(str(suspicion))
    sys.exit(1 if found else 0)


@command
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--mindspeed", type=click.Path(exists=True, file_okay=False), help="Folder with mindspeed/: read what it applies."
)
def structure(model, mindspeed):
    """Axis 5: the attention scale of MODEL: what config.json asks for and what runs.

    Builds one layer of the model with transformers on the CPU and measures it. Running jobs measure themselves when
    they start. Exit code 1: they differ.

    \b
    bin/probe structure runs/npu-1/model --mindspeed /opt/MindSpeed
    """
    from atlasrl.precision import structure as axis

    config = axis.config_of(Path(model))
    click.echo(f"config.json: {axis.expected_scale(config)}")
    verdicts = [axis.measured_layer(Path(model), config)]
    if mindspeed:
        applied = axis.mindspeed_scale(config, Path(mindspeed))
        value = applied.value if applied else axis.expected_scale(config).value
        verdicts.append(axis.judge(f"MindSpeed in {mindspeed}", value, config, "float32"))
    for verdict in verdicts:
        click.echo(str(verdict))
    sys.exit(0 if all(verdict.ok for verdict in verdicts) else 1)


@command
@click.argument("run")
@of_runs
@click.option("--all", "every", is_flag=True, help="Show differences without a known effect on accuracy too.")
def bridges(run, runs, every):
    """Axis 5: the settings that RUN's Megatron gets with use_mbridge, and without.

    Both ways turn config.json into Megatron's configuration, with the run's overrides and the fixes in force. Exit code
    1: a difference can move accuracy.

    \b
    bin/probe bridges runs/npu-1
    """
    from atlasrl import plan as plans
    from atlasrl.precision import bridges as axis
    from atlasrl.precision import configs

    sides = axis.sides(plans.load(_run(run, runs)))
    found = configs.differences(*sides)
    click.echo(configs.text(*sides, found, every))
    sys.exit(1 if configs.telling(found) else 0)


@command
@click.option("--address", help="Ray cluster. Default: RAY_ADDRESS, or a private one on this machine.")
@click.option("--size", type=click.IntRange(min=8), default=2048, show_default=True, help="Rows of the matrices.")
@click.option("--rounds", type=click.IntRange(min=2), default=5, show_default=True)
@click.option("--no-link", is_flag=True, help="Do not exchange blocks between neighbours.")
@click.option(
    "--exclude", type=click.Path(dir_okay=False), help="Write the odd nodes here, as Slurm's --exclude takes them."
)
@click.option("--exclude-slow", is_flag=True, help="Slow nodes too.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def stress(address, size, rounds, no_link, exclude, exclude_slow, as_json):
    """Axis 3: does every device of every node compute the same, bit by bit?

    Exit code 1: a device is odd.

    \b
    bin/probe stress --address 10.0.0.1:6379 --exclude bad-nodes
    sbatch --exclude="$(cat bad-nodes)" …
    """
    from atlasrl.precision import fleet
    from atlasrl.precision import stress as axis
    from atlasrl.rundir import write_atomically

    with fleet.cluster(address):
        reports = fleet.stress(size=size, rounds=rounds, link=not no_link)
    verdict = axis.judge(reports)
    if as_json:
        click.echo(json.dumps(axis.as_json(reports, verdict), indent=1))
    else:
        for line in axis.lines(reports, verdict):
            click.echo(line)
    if exclude:
        write_atomically(Path(exclude).absolute(), verdict.exclude(exclude_slow) + "\n")
    sys.exit(0 if verdict.ok else 1)


@command
@click.argument("run")
@of_runs
@click.option("-n", "count", type=click.IntRange(min=1), default=4, show_default=True, help="Prompts.")
@click.option("--prompt", "texts", multiple=True, help="Ask this instead of the run's data; repeat for several.")
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="Another checkpoint, such as RUN/export.")
@click.option("--engines", type=click.IntRange(min=1), default=1, show_default=True, help="CPU engines side by side.")
@click.option("--address", help="Ray cluster. Default: RAY_ADDRESS, or a private one on this machine.")
@click.option("--log-probs", is_flag=True, help="Show each token with its log-probability.")
def infer(run, runs, count, texts, model, engines, address, log_probs):
    """The rollout engine of RUN alone: samples, tokens a second, log-probabilities.

    \b
    bin/probe infer tiny -n 8
    bin/probe infer tiny --model runs/tiny/export --prompt 49172
    """
    from atlasrl import plan as plans
    from atlasrl.precision import fleet
    from atlasrl.precision import infer as axis

    plan = plans.load(_run(run, runs))
    prompts = list(texts) or axis.prompts_of(Path(plan.val or plan.train), count)
    with fleet.cluster(address):
        session = axis.ask(plan.recipe, Path(model or plan.model), prompts, engines)
    for line in axis.lines(session, log_probs):
        click.echo(line)


VERBS: dict[str, click.Command] = {
    "data": data,
    "stress": stress,
    "structure": structure,
    "bridges": bridges,
    "weights": weights,
    "infer": infer,
}
