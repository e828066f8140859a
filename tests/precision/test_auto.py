"""The walk over the axes, on what runs record: a cause is named, a clean seed is not accused, a gap is admitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_configs import run_of

from atlasrl.precision import auto, weights
from atlasrl.rundir import RunDir
from atlasrl.trainer import records


def recorded(folder: Path, *changes: str, order=1, dropped=0, template="t", edit=None, log="", gap=1e-6) -> RunDir:
    """A run of two steps that recorded its samples, two syncs of two workers, and its metrics."""
    run_of(folder, *changes)
    run = RunDir(folder)
    attempt = run.attempt(1)
    attempt.logs.mkdir(parents=True)
    prompts = [f"{n}:{n:012x}" for n in range(dropped, dropped + 16)][::order]
    for step in (1, 2):
        ids = prompts[8 * (step - 1) : 8 * step]
        line = {
            "step": step,
            "prompt_ids": ids,
            "prompt_tokens": [f"{template}{i}" for i in ids],
            "responses": str(step),
        }
        records.append(attempt.samples, line)
    for worker in (0, 1):
        for sync in (1, 2):
            table = {name: [f"{name}-{sync}", 1.0] for name in ("a.weight", "b.weight", "c.weight")}
            before = {name: [f"{name}-{sync - 1}", 1.0] for name in table}
            line = {"sync": sync, "sent": table, "before": before, "after": dict(table), "stale": []}
            if edit:
                edit(line, worker)
            weights.append(attempt.weights / f"worker-{worker}.jsonl", line)
    metrics = {"step": 1, "data": {auto.GAP: gap, "actor/grad_norm": 1.0}}
    attempt.metrics.write_text(json.dumps(metrics) + "\n")
    (attempt.logs / "train-node0.log").write_text(log)
    return run


def skip(line, worker):
    if line["sync"] == 2:
        line["after"]["b.weight"] = line["before"]["b.weight"]


def go_stale(line, worker):
    line["stale"] = ["W_UV is a copy of b.weight"] if line["sync"] == 2 else []


def cast(line, worker):
    for side in ("sent", "after"):
        line[side]["c.weight"] = ["coarse", 1.0]


def diverge(line, worker):
    if worker == 1 and line["sync"] == 2:
        line["sent"]["a.weight"] = line["after"]["a.weight"] = ["flipped", 1.0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"edit": skip}, "sync 2: b.weight differs between training and rollout"),
        ({"edit": go_stale}, "W_UV is a copy of b.weight"),
        ({"edit": cast}, "c.weight"),
        ({"edit": diverge}, "worker-1 differs from that of worker-0: replicas have diverged"),
        ({"order": -1}, "in another order"),
        ({"template": "u"}, "the same text but other tokens"),
        ({"log": "error: the softmax scale of 2 attention layers is wrong\n"}, "softmax scale"),
    ],
)
def test_each_fault_is_named_by_its_axis(tmp_path, fault, words):
    axes = auto.walk(recorded(tmp_path / "run", **fault), recorded(tmp_path / "base"))
    assert words in auto.cause(axes).what
    assert f"cause: {auto.cause(axes).what}" in auto.text(RunDir(tmp_path / "run"), RunDir(tmp_path / "base"), axes)


def test_a_clean_seed_is_not_accused(tmp_path):
    base = recorded(tmp_path / "base")
    again = recorded(tmp_path / "again")
    other = recorded(tmp_path / "other", "seed=5", order=-1, gap=2e-6)
    for run in (again, other):
        axes = auto.walk(run, base)
        assert auto.cause(axes) is None, auto.text(run, base, axes)


@pytest.mark.parametrize("both", [{"edit": skip}, {"log": "warning: fix a is switched off\n"}])
def test_what_both_runs_show_alike_is_no_cause(tmp_path, both):
    assert auto.cause(auto.walk(recorded(tmp_path / "a", **both), recorded(tmp_path / "b", **both))) is None


@pytest.mark.parametrize("sampling", [True, False])
def test_prompts_that_one_run_lacks_are_a_cause_only_where_nothing_drops_groups(tmp_path, sampling):
    setting = f"dapo.dynamic_sampling={str(sampling).lower()}"
    sides = [recorded(tmp_path / str(dropped), setting, dropped=dropped) for dropped in (2, 0)]
    axes = auto.walk(*sides)
    assert (auto.cause(axes) is None) is sampling and "2 prompts ahead of" in auto.text(*sides, axes)


def test_a_gap_between_the_engines_is_a_symptom_not_a_cause(tmp_path):
    run, base = recorded(tmp_path / "run", gap=1e-2), recorded(tmp_path / "base")
    axes = auto.walk(run, base)
    assert auto.cause(axes) is None and "symptom rollout and actor differ" in auto.text(run, base, axes)


def test_what_was_not_recorded_is_said_with_the_setting_that_records_it(tmp_path):
    run_of(tmp_path / "a")
    run_of(tmp_path / "b")
    sides = [RunDir(tmp_path / name) for name in "ab"]
    text = auto.text(*sides, auto.walk(*sides))
    assert "probe.syncs: 3" in text and "bin/probe dump" in text and "no cause found; not examined: 2 data" in text


def test_a_stress_test_that_was_cut_off_is_told(tmp_path):
    run, base = recorded(tmp_path / "run"), recorded(tmp_path / "base")
    (run.path / "stress.json").touch()
    assert "stress.json is no result of bin/probe stress" in auto.text(run, base, auto.walk(run, base))
