"""The guard in the job: what it tells, when it ends a run, and what it leaves alone."""

from __future__ import annotations

import json

import pytest

from atlasrl.errors import Fault
from atlasrl.recipe import Guard
from atlasrl.rundir import RunDir
from atlasrl.trainer.watchman import Watchman

LIMIT = 1024


class TrainingRun:
    """A run directory that grows a line of metrics at a time."""

    def __init__(self, path):
        self.dir = RunDir(path)
        self.attempt = self.dir.attempt(1)
        self.attempt.path.mkdir(parents=True)
        self.dir.plan.write_text("{}")

    def log(self, *steps, length=LIMIT):
        with self.attempt.metrics.open("a") as file:
            for step in steps:
                data = {"response_length/mean": length, "response_length/max": LIMIT, "critic/rewards/mean": 0.1}
                file.write(json.dumps({"step": step, "data": data}) + "\n")

    def told(self):
        return [event for event in self.dir.events() if event["event"] == "guard"] if self.dir.journal.exists() else []


@pytest.fixture
def training(tmp_path):
    return TrainingRun(tmp_path / "run")


def stop(**changes) -> Guard:
    return Guard(action="stop", after_steps=6, **changes)


def test_a_garbled_rollout_ends_the_run_naming_metric_rule_and_step(training, capsys):
    watchman = Watchman(stop(), training.attempt)
    training.log(*range(1, 6))
    assert watchman.look(5) is None, "judged before after_steps"
    training.log(6)
    why = watchman.look(6)
    assert why.startswith("response_length fails pinned_at_maximum since step ")
    assert "\n" not in why
    (told,) = training.told()
    assert (told["step"], told["action"], told["attempt"]) == (6, "stop", 1)
    assert capsys.readouterr().out.startswith("warning: step 6: guard: response_length fails pinned_at_maximum")


def test_a_warning_guard_says_it_once_and_ends_nothing(training, capsys):
    watchman = Watchman(Guard(action="warn", after_steps=6), training.attempt)
    for step in range(1, 12):
        training.log(step)
        assert watchman.look(step) is None
    assert len(training.told()) == 1
    assert capsys.readouterr().out.count("guard: ") == 1


def test_a_run_in_order_hears_nothing(training, capsys):
    watchman = Watchman(stop(), training.attempt)
    for step in range(1, 30):
        training.log(step, length=300 + step)
        assert watchman.look(step) is None
    assert training.told() == []
    assert capsys.readouterr().out == ""


def test_who_resumes_a_run_that_the_guard_ended_goes_on(training):
    """The failure is told at the start of the next attempt; only what starts to fail later ends it."""
    training.log(*range(1, 8))
    watchman = Watchman(stop(), training.attempt)
    assert [event["action"] for event in training.told()] == ["warn"]
    training.log(8)
    assert watchman.look(8) is None


def test_a_guard_that_can_read_no_longer_says_so_once_and_the_run_goes_on(training, capsys):
    watchman = Watchman(stop(), training.attempt)
    training.log(1)
    with training.attempt.metrics.open("a") as file:
        file.write("{damaged}\n{damaged}\n")
    assert watchman.look(1) is None
    assert watchman.look(2) is None
    assert [event["action"] for event in training.told()] == ["off"]
    assert "judges no longer" in capsys.readouterr().out


def test_a_baseline_that_is_not_there_is_a_fault_before_the_first_step(training, tmp_path):
    with pytest.raises(Fault, match="no baseline"):
        Watchman(stop(baseline=tmp_path / "gpu"), training.attempt)
