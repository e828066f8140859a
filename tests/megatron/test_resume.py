"""Killed with -9, at a random moment or during a save, a Megatron run repeats every later step bit by bit."""

from __future__ import annotations

import random
import shutil

import pytest

from atlasrl import checkpoints
from atlasrl.rundir import RunDir
from runs import Attempt, exported_weights, numbers, small_recipe, start_run

pytestmark = [pytest.mark.nightly, pytest.mark.training]

STEPS, SAVE_EVERY = 8, 2
CHANGES = {"steps": STEPS, "checkpoint.save_every": SAVE_EVERY, "checkpoint.keep": 10}
LAYOUTS = {
    "DP2 EP2": {"expert": 16},
    "PP2": {"pipeline": 16},
    "TP2 EP2": {"tensor": 8, "expert": 16},
    "DP2 PP2 EP2": {"pipeline": 4, "expert": 8},
}
TOLERANCE = 1e-4
"""Relative difference of grad_norm after a resume on another layout: sums are taken in another order."""


def same_inputs(folder, recipe):
    """A second run of the same recipe in `folder`."""
    return start_run(folder, recipe)


@pytest.fixture(scope="module", params=LAYOUTS, ids=LAYOUTS.keys())
def uninterrupted(request, tmp_path_factory):
    """A recipe and its run from the first to the last step."""
    folder = tmp_path_factory.mktemp("whole")
    changes = dict(CHANGES)
    if request.param == "PP2":
        changes |= {"nodes": 1, "devices_per_node": 2}
    recipe = small_recipe(folder / "small", changes, **LAYOUTS[request.param])
    run = start_run(folder / "run", recipe)
    attempt = Attempt(run, 1)
    assert attempt.wait() == 0, attempt.tail()
    return recipe, run, attempt


def check_repeated(uninterrupted, run: RunDir, later: Attempt, first_step: int) -> None:
    _, whole_run, whole = uninterrupted
    expected = {step: values for step, values in numbers(whole).items() if step > first_step}
    assert numbers(later) == expected
    ours, theirs = exported_weights(run), exported_weights(whole_run)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_killed_at_a_random_moment(uninterrupted, tmp_path):
    recipe, _, _ = uninterrupted
    run = start_run(tmp_path / "run", recipe)
    first = Attempt(run, 1)
    step = random.randint(SAVE_EVERY + 1, STEPS - 1)
    first.until(lambda: step in first.steps(), f"step {step}")
    first.kill()
    newest = checkpoints.choose(run)
    second = Attempt(run, 2, resume_from=newest.path)
    assert second.wait() == 0, f"killed after step {step}: {second.tail()}"
    check_repeated(uninterrupted, run, second, newest.step)


def test_killed_while_it_writes_a_checkpoint(uninterrupted, tmp_path):
    recipe, _, _ = uninterrupted
    run = start_run(tmp_path / "run", recipe)
    first = Attempt(run, 1)
    half_done = checkpoints.folder(run, 2 * SAVE_EVERY)
    first.until(lambda: any(half_done.rglob("*.distcp")), "a file of the second checkpoint")
    first.kill()
    newest = checkpoints.choose(run)
    assert newest.step == SAVE_EVERY, "the checkpoint was complete before the kill; nothing was tested"
    second = Attempt(run, 2, resume_from=newest.path)
    assert second.wait() == 0, second.tail()
    check_repeated(uninterrupted, run, second, newest.step)


TWO_WORKERS = {"nodes": 1, "devices_per_node": 2}
OTHERS = {  # all of two replicas: how answers are dealt out to replicas and micro-batches weighs them differently
    "TP2 EP2": ({}, {"tensor": 8, "expert": 16}),
    "PP2, experts whole": ({}, {"pipeline": 16}),
    "DP2, experts whole": (TWO_WORKERS, {}),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A whole run of two replicas that share the experts, with its answers."""
    folder = tmp_path_factory.mktemp("recorded")
    recipe = small_recipe(folder / "small", {**CHANGES, **TWO_WORKERS, "rollout.record": True}, expert=16)
    whole = Attempt(start_run(folder / "run", recipe), 1)
    assert whole.wait() == 0, whole.tail()
    return whole


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_another_layout_continues_within_tolerance(recorded, tmp_path, other):
    """On the same answers: another number of engines samples others."""
    workers, parallel = other
    changes = {**CHANGES, **workers, "rollout.replay": str(recorded.run.path)}
    moved = start_run(tmp_path / "moved", small_recipe(tmp_path / "small", changes, **parallel))
    shutil.copytree(checkpoints.folder(recorded.run, 4), checkpoints.folder(moved, 4))
    again = Attempt(moved, 1, resume_from=checkpoints.folder(moved, 4))
    assert again.wait() == 0, again.tail()
    expected = numbers(recorded)
    assert sorted(numbers(again)) == [5, 6, 7, 8]
    for step, values in numbers(again).items():
        assert values == pytest.approx(expected[step], rel=TOLERANCE, abs=TOLERANCE), f"step {step}"
