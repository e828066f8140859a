"""Walk the six axes of accuracy over what two runs left behind, and name the cause of their difference.

Nothing is run: every axis reads files. What a run did not record is said, with the setting that records it. A finding
is a cause when it alone makes two runs part; a consequence (other groups kept, a gap between engines) is a symptom.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from atlasrl.curves.checks import SAME_WEIGHTS
from atlasrl.errors import Fault
from atlasrl.precision import configs, effective
from atlasrl.rundir import RunDir, read_json_lines

GAP = "training/rollout_actor_log_prob_gap"
SAMPLING = "algorithm.filter_groups.enable"
GAP_FACTOR = 10  # how many times the baseline's gap is more than another draw of answers
SPOKEN = re.compile(r"^(?:warning|error|atlasrl\.errors\.Fault): (.*)", re.MULTILINE)  # said by us, here or in a worker
ALARMS = ("softmax scale", "was not updated with it", "differ by", "diverged", "replicas", "fix ")
"""Words of the warnings and errors of a run that are about accuracy."""
MOST = 3  # tensors that are named where one fault changes many


@dataclass(frozen=True)
class Finding:
    """What was found, whether it is a cause, and the command that looks closer."""

    what: str
    is_cause: bool
    next: str = ""


@dataclass
class Axis:
    """One axis: what was found, or why it could not be examined."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    skipped: str = ""


def walk(run: RunDir, baseline: RunDir) -> list[Axis]:
    """Examine every axis, cheap and certain ones first.

    Raises:
        Fault: one side is no run.
    """
    sides = tuple(effective.load(str(side.path)) for side in (run, baseline))
    axes: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("alarms of the run itself", lambda: _alarms(run, baseline)),
        ("1 configuration", lambda: _configuration(run, baseline, *sides)),
        ("2 data", lambda: _data(run, baseline, *sides)),
        ("3 hardware", lambda: _hardware(run)),
        ("4 stack", lambda: _stack(run, baseline)),
        ("5 weights and conversion", lambda: _weights(run, baseline)),
        ("6 scoring", lambda: _scoring(run, *sides)),
        ("rollout against training", lambda: _gap(run, baseline)),
    ]
    return [_examined(name, examine) for name, examine in axes]


def cause(axes: list[Axis]) -> Finding | None:
    """The first cause found."""
    return next((finding for axis in axes for finding in axis.findings if finding.is_cause), None)


def _examined(name: str, examine: Callable[[], Iterator[Finding]]) -> Axis:
    try:
        return Axis(name, list(examine()))
    except Fault as fault:
        return Axis(name, skipped=str(fault))


def _alarms(run: RunDir, baseline: RunDir) -> Iterator[Finding]:
    """What the run's own checks said, and those of the baseline did not."""
    known = _told(baseline)
    for line in _told(run):
        if line not in known:
            yield Finding(line, "differ by" not in line, f"bin/logs {run.name}")


def _told(run: RunDir) -> list[str]:
    """Warnings and errors of a run that are about accuracy, once each and in order."""
    logs = [file for attempt in run.attempts() for file in sorted(attempt.logs.glob("train-*.log"))]
    said = [line for file in logs for line in SPOKEN.findall(file.read_text(errors="replace"))]
    about = [line for line in said if any(word in line for word in ALARMS)]
    return list(dict.fromkeys(re.sub(r"^step \d+: |^sync \d+: ", "", line) for line in about))


def _configuration(run: RunDir, baseline: RunDir, left, right) -> Iterator[Finding]:
    for each in configs.telling(configs.differences(left, right)):
        what = f"{each.key}: {each.left} here, {each.right} in the baseline: {each.effect.reason}"
        is_cause = each.effect.level == "strong"
        yield Finding(what, is_cause, f"bin/probe configs {run.path} {baseline.path}")


def _data(run: RunDir, baseline: RunDir, left, right) -> Iterator[Finding]:
    """Other prompts, order or tokens. What dynamic sampling kept follows from the answers and is no cause."""
    from atlasrl.precision import data

    same_seed = left.settings.get("data.seed") == right.settings.get("data.seed")
    consequences = ("selection", "duplicates", "shift" if left.settings.get(SAMPLING) else "")
    for each in data.compare(data.samples(run), data.samples(baseline), same_seed=same_seed):
        is_cause = each.cause not in consequences
        yield Finding(each.what, is_cause, f"bin/probe data {run.path} {baseline.path}")


def _hardware(run: RunDir) -> Iterator[Finding]:
    """The result of bin/probe stress, and workers whose weights part from the others'."""
    from atlasrl.precision import weights

    results = [file for folder in (run.path, *(a.path for a in run.attempts())) for file in folder.glob("stress.json")]
    watched = _weight_folders(run)
    for folder in watched:
        for each in itertools.islice(weights.disagreements(weights.read(folder)), MOST):
            yield Finding(
                f"{each}: replicas have diverged, a device or a link computes wrongly", True, "bin/probe stress"
            )
    for file in results:
        try:
            odd = json.loads(file.read_text())["verdict"]["odd"]
        except (OSError, ValueError, KeyError):
            raise Fault(f"{file} is no result of bin/probe stress --json; run it again") from None
        yield from (Finding(reason, True, "bin/probe stress") for reasons in odd.values() for reason in reasons)
    if not results and not watched:
        raise Fault("no device was stressed and no sync watched; run bin/probe stress, or set probe.syncs: 3")


def _stack(run: RunDir, baseline: RunDir) -> Iterator[Finding]:
    from atlasrl.precision import bisect, dumps

    folders = [side.path / "stack" for side in (run, baseline)]
    if not all((folder / "dump.json").is_file() for folder in folders):
        raise Fault(
            f"no dumps: bin/probe dump {run.path} {folders[0]}, and the same for the baseline over the same rollout"
        )
    found = bisect.compare(*(dumps.read(folder) for folder in folders))
    if found.culprit:
        yield Finding(f"{found.culprit}: {found.why}", True, f"bin/probe stack {folders[0]} {folders[1]}")


def _weights(run: RunDir, baseline: RunDir) -> Iterator[Finding]:
    """Syncs that lost a tensor, stale derived tensors, and start weights that differ between the runs."""
    from atlasrl.precision import weights

    folders = [_weight_folders(side) for side in (run, baseline)]
    if not folders[0]:
        raise Fault("no sync was watched; set probe.syncs: 3 in the recipe of both runs")
    ours = [weights.read(folder) for folder in folders[0]]
    theirs = [weights.read(folder) for folder in folders[1]]
    known = {str(each) for workers in theirs for syncs in workers.values() for each in weights.suspicions(syncs)}
    for workers in ours:
        for worker, syncs in workers.items():
            new = (each for each in weights.suspicions(syncs) if str(each) not in known)
            for each in itertools.islice(new, MOST):
                yield Finding(f"{worker}, {each}", True, f"bin/probe weights {run.path}")
    if ours and theirs:
        yield from _start_weights(ours[0], theirs[0])


def _start_weights(ours: dict, theirs: dict) -> Iterator[Finding]:
    """What the first sync sent, before any update: the converted checkpoint."""
    left, right = (next(iter(workers.values()))[0]["sent"] for workers in (ours, theirs))
    for name in left.keys() ^ right.keys():
        yield Finding(f"{name} is sent by one run only: another conversion of the checkpoint", True, "bin/ckpt diff")
        return
    other = [name for name in left if left[name][0] != right[name][0]]
    if other:
        what = f"{len(other)} of {len(left)} tensors differ before the first update, such as {', '.join(other[:3])}"
        yield Finding(f"{what}: another checkpoint, conversion or dtype", True, "bin/ckpt diff")


def _scoring(run: RunDir, left, right) -> Iterator[Finding]:
    """With two reward files and recorded answers: how often they disagree."""
    from atlasrl.precision import answers, scoring

    key = "custom_reward_function.path"
    rules = [side.settings.get(key) for side in (left, right)]
    if left.files.get("reward") == right.files.get("reward"):
        return
    if not run.rollouts.is_dir() or not all(rule and Path(str(rule)).is_file() for rule in rules):
        raise Fault("the reward rules differ; record answers (rollout.record: true) to see on which they disagree")
    given = answers.read(run.path)
    found = scoring.compare(given, *(scoring.Rule.parse(str(rule)) for rule in rules))
    command = f"bin/probe scoring {run.path} {rules[0]} {rules[1]}"
    if found:
        yield Finding(f"the reward rules disagree on {len(found)} of {len(given)} recorded answers", True, command)


def _gap(run: RunDir, baseline: RunDir) -> Iterator[Finding]:
    """How far rollout and actor are apart in log-probability: the symptom of a sync, scale or device fault."""
    ours, theirs = _largest(run, GAP), _largest(baseline, GAP)
    if ours is None or theirs is None:
        raise Fault(f"no {GAP} in metrics.jsonl of both runs")
    if ours > max(GAP_FACTOR * theirs, SAME_WEIGHTS):
        what = f"rollout and actor differ by up to {ours:.2e} per token, {theirs:.2e} in the baseline"
        yield Finding(
            f"{what}: they compute with other weights, another scale or another kernel", False, "bin/probe weights"
        )


def _largest(run: RunDir, name: str) -> float | None:
    values = [
        line["data"][name]
        for attempt in run.attempts()
        for line in read_json_lines(attempt.metrics)
        if isinstance(line.get("data", {}).get(name), (int, float))
    ]
    return max(values, default=None)


def _weight_folders(run: RunDir) -> list[Path]:
    folders = [attempt.weights for attempt in run.attempts()]
    return [folder for folder in folders if any(folder.glob("worker-*.jsonl"))]


def text(run: RunDir, baseline: RunDir, axes: list[Axis]) -> str:
    """The walk for a person: each axis, then the cause."""
    lines = [f"run       {run.path}", f"baseline  {baseline.path}"]
    for axis in axes:
        state = "not examined" if axis.skipped else f"{len(axis.findings)} found" if axis.findings else "nothing"
        lines.append(f"{axis.name}: {state}" + (f": {axis.skipped}" if axis.skipped else ""))
        for finding in axis.findings:
            lines.append(f"  {'cause  ' if finding.is_cause else 'symptom'} {finding.what}")
    named = cause(axes)
    if named is not None:
        lines.append(f"cause: {named.what}")
        lines.append(f"look closer: {named.next}")
    else:
        rest = [axis.name for axis in axes if axis.skipped]
        lines.append("no cause found" + (f"; not examined: {', '.join(rest)}" if rest else ""))
    return "\n".join(lines)


def as_json(axes: list[Axis]) -> dict:
    """The walk as data."""
    from dataclasses import asdict

    named = cause(axes)
    return {"cause": asdict(named) if named else None, "axes": [asdict(axis) for axis in axes]}
