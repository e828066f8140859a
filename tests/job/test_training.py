"""The whole job with the real verl on two Ray nodes: an interrupted run equals an uninterrupted one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from atlasrl import checkpoints, progress
from atlasrl.rundir import RunDir, read_json_lines
from tests.job.conftest import job_processes, kill_job, wait_until

pytestmark = pytest.mark.training

STEPS, SAVE_EVERY = 5, 2
OPTIONS = ["tiny", "--nodes", 2, "--set", f"steps={STEPS}", "--set", f"checkpoint.save_every={SAVE_EVERY}"]


def samples(run: RunDir) -> dict[int, dict]:
    """What each step saw and made; a later attempt wins from its first step on."""
    seen = {}
    for attempt in run.attempts():
        for line in read_json_lines(attempt.samples):
            seen[line["step"]] = {key: value for key, value in line.items() if key not in ("time", "attempt")}
    return seen


def exported(run: RunDir) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in run.export.glob("*.safetensors")}


def tensorboard_steps(folder: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [scalar.step for scalar in events.Scalars(tag)]


def test_run_killed_with_9_and_resumed_by_job_id_equals_an_uninterrupted_one(commands):
    whole = RunDir(commands.runs / "whole")
    done = commands.run("train", *OPTIONS, "--name", "whole", "--follow", deadline=600)
    assert done.returncode == 0, done.stdout + done.stderr
    ray_up = next(event for event in whole.events() if event["event"] == "ray_up")
    assert sorted(ray_up["resources"]) == ["node0", "node1"]
    assert json.loads((checkpoints.choose(whole).path / "COMPLETE").read_text())["world_size"] == 2

    broken = RunDir(commands.runs / "broken")
    started = commands.run("train", *OPTIONS, "--name", "broken", "--json")
    job = json.loads(started.stdout)["job"]
    wait_until(lambda: progress.of(broken).step == SAVE_EVERY + 1, 300, "a step after the first checkpoint")
    kill_job(commands.runs)
    wait_until(lambda: not job_processes(commands.runs), 60, "the end of every process")
    assert json.loads(commands.run("status", "broken", "--json").stdout)[0]["state"] == "died"

    resumed = commands.run("resume", job, "--follow", deadline=600)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"from step {SAVE_EVERY}" in resumed.stdout

    assert sorted(samples(broken)) == list(range(1, STEPS + 1))
    assert samples(broken) == samples(whole)
    assert progress.of(broken).rewards == progress.of(whole).rewards
    assert exported(broken) == exported(whole) != {}
    assert tensorboard_steps(broken.tensorboard, progress.REWARD) == list(range(1, STEPS + 1))
    assert [event["event"] for event in broken.events()].count("attempt_start") == 2


def test_real_weights_train_for_two_steps(commands):
    changes = {
        "steps": 2,
        "validate_every": 0,
        "data.max_response_tokens": 12,
        "rollout.samples": 4,
        "dapo.train_batch_size": 2,
        "dapo.mini_batch_size": 2,
        "dapo.gen_batch_size": 4,
        "dapo.micro_batch_size": 8,
        "dapo.overlong.buffer_tokens": 4,
    }
    small = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    done = commands.run("train", "smollm2-135m", "--name", "real", *small, "--follow", deadline=900)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(commands.runs / "real")
    assert sorted(progress.of(run).rewards) == [1, 2]
    weights = [line["weights"] for line in read_json_lines(run.attempt(1).samples)]
    assert len(set(weights)) == 2, "the second step answered with the weights of the first"
    assert sum(file.stat().st_size for file in run.export.glob("*.safetensors")) > 250e6
