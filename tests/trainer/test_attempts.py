"""Attempts of small runs on a real Ray: interrupted and not, killed while saving, out of disk, out of mixed groups.

One Ray serves all tests; every attempt is a process of its own, as in a job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainer_assets import deterministic_variables, make_assets, recipe_tree, write_plan

from atlasrl import checkpoints
from atlasrl.rundir import RunDir, read_json_lines

pytestmark = pytest.mark.cluster

PYLIB = Path(__file__).parents[2] / "pylib"
DEADLINE = 900


@pytest.fixture(scope="module")
def ray_address():
    """A Ray with two logical NPUs, owned by this process alone."""
    ray = pytest.importorskip("ray")
    for name in ("RAY_worker_niceness", "RAY_prestart_worker_first_driver"):  # as env/cpu.env.sh says
        os.environ.setdefault(name, "0")
    context = ray.init(address="local", num_cpus=16, resources={"NPU": 2}, include_dashboard=False, log_to_driver=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"))


class Attempt:
    """One `python -m atlasrl.trainer` process."""

    def __init__(self, run: RunDir, number: int, address: str, resume: bool = False, **environment):
        self.run, self.dir = run, run.attempt(number)
        self.dir.path.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "atlasrl.trainer", str(run.path), "--attempt", str(number)]
        if resume:
            command += ["--resume-from", str(checkpoints.choose(run).path)]
        self.log = self.dir.path / "train.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(PYLIB), "RAY_ADDRESS": address, **environment},
            )

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE)
        finally:
            self.process.kill()

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"no {what} within {DEADLINE} s:\n{self.tail()}"
            time.sleep(0.005)  # a save takes longer; a busy loop would take a core from the run it waits for

    def tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-30:])

    def error(self) -> str:
        return next((line for line in self.log.read_text().splitlines() if line.startswith("error: ")), "")

    def steps(self) -> list[int]:
        return [line["step"] for line in read_json_lines(self.dir.metrics)]

    def metric(self, name: str) -> list[float]:
        return [line["data"][name] for line in read_json_lines(self.dir.metrics) if name in line["data"]]

    def samples(self) -> list[dict]:
        return list(read_json_lines(self.dir.samples))


def plan(tmp_path, assets, name, *, validate=False, **changes) -> RunDir:
    return write_plan(tmp_path / name, recipe_tree(assets, **changes), assets, validate=validate)


def final_weights(run: RunDir):
    import torch

    newest = checkpoints.choose(run)
    files = sorted((newest.path / "actor").glob("model_*.pt")) + sorted((newest.path / "actor").glob("optim_*.pt"))
    return newest.step, [torch.load(file, weights_only=False) for file in files]


def same(left, right) -> bool:
    """Bitwise equality of nested state dicts with (distributed) tensors."""
    import torch

    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        local = [t.to_local() if hasattr(t, "to_local") else t for t in (left, right)]
        return torch.equal(*local)
    return left == right


def curve_steps(run: RunDir, tag="critic/score/mean") -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0})
    return [event.step for event in events.Reload().Scalars(tag)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, assets, ray_address):
    """An uninterrupted run of four steps on two workers, validated on the way."""
    run = plan(
        tmp_path_factory.mktemp("whole"), assets, "whole", validate=True, steps=4, devices_per_node=2, validate_every=2
    )
    attempt = Attempt(run, 1, ray_address)
    assert attempt.wait() == 0, attempt.tail()
    return attempt


def test_a_run_leaves_a_line_per_step_checkpoints_and_a_curve(whole):
    assert whole.steps() == [0, 1, 2, 3, 4]  # 0: validation before training
    assert curve_steps(whole.run) == [1, 2, 3, 4]
    assert [c.step for c in checkpoints.complete(whole.run)] == [4, 3]
    assert [e["step"] for e in whole.run.events() if e["event"] == "checkpoint"] == [1, 2, 3, 4]
    assert "done: 4 steps" in whole.log.read_text()


def test_the_weights_reach_the_rollout_anew_in_every_step(whole):
    digests = [line["weights"] for line in whole.samples()]
    assert len(set(digests)) == 4
    assert max(whole.metric("training/rollout_actor_log_prob_gap")) < 1e-5


def test_overlong_shaping_is_on(whole):
    """Scores are ±1 and the penalty reaches 0.5: without shaping none would be outside."""
    assert min(whole.metric("critic/score/min")) < -1.0


def test_generation_counts_into_the_time_of_its_step(whole):
    for step, gen, update in zip(
        whole.metric("timing_s/step"), whole.metric("timing_s/gen"), whole.metric("timing_s/update_actor"), strict=True
    ):
        assert step >= gen + update
        assert gen > 0


@pytest.mark.nightly
def test_killed_while_saving_and_resumed_the_run_ends_bitwise_equal(whole, tmp_path, assets, ray_address):
    """kill -9 in the middle of the save of step 3; resume from step 2; compare samples, weights and optimizer."""
    run = plan(tmp_path, assets, "killed", validate=True, steps=4, devices_per_node=2, validate_every=2)
    first = Attempt(run, 1, ray_address)
    saving = checkpoints.folder(run, 3) / "actor"
    first.until(saving.is_dir, "the save of step 3")
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert checkpoints.choose(run).step in {2, 3}
    resumed_from = checkpoints.choose(run).step
    second = Attempt(run, 2, ray_address, resume=True)
    assert second.wait() == 0, second.tail()

    assert second.steps() == list(range(resumed_from + 1, 5))
    assert second.samples() == whole.samples()[resumed_from:]
    assert curve_steps(run) == [1, 2, 3, 4], "a step is missing from the curve or in it twice"
    assert [c.step for c in checkpoints.complete(run)] == [4, 3]
    assert same(final_weights(run), final_weights(whole.run))


def test_stopped_on_request_it_saves_between_steps(whole, tmp_path, assets, ray_address):
    run = plan(tmp_path, assets, "stopped", steps=4, devices_per_node=2, checkpoint={"save_every": 100, "keep": 2})
    attempt = Attempt(run, 1, ray_address)
    attempt.until(lambda: 1 in attempt.steps(), "step 1")
    attempt.dir.stop_request.write_text('{"save": true}')
    assert attempt.wait() == 85, attempt.tail()
    done = checkpoints.choose(run).step
    assert attempt.steps()[-1] == done < 4
    assert f"stopped on request after step {done} of 4" in attempt.error()
    assert attempt.samples() == whole.samples()[:done]


@pytest.mark.nightly
def test_the_guard_ends_a_run_after_a_checkpoint(tmp_path, assets, ray_address):
    """A limit of 0 for what float32 rounding alone makes: the rule fails as soon as it may judge, at step 2."""
    rules = tmp_path / "rules.yaml"
    checks = "[{check: mean_value, at_most: 0, source: test}]"
    rules.write_text(f"window: 1\nleast_points: 1\nmetrics: {{rollout_probability_difference: {checks}}}\n")
    guard = {"action": "stop", "after_steps": 2, "rules": str(rules)}
    run = plan(tmp_path, assets, "guarded", steps=3, guard=guard, checkpoint={"save_every": 100, "keep": 2})
    attempt = Attempt(run, 1, ray_address)
    assert attempt.wait() == 1, attempt.tail()
    assert "the guard ended the run after step 2 of 3: rollout_probability_difference fails" in attempt.error()
    assert checkpoints.choose(run).step == 2
    assert [(e["step"], e["action"]) for e in run.events() if e["event"] == "guard"] == [(2, "stop")]


def test_sigterm_ends_at_once_with_its_own_code(tmp_path, assets, ray_address):
    run = plan(tmp_path, assets, "terminated", steps=1000)
    attempt = Attempt(run, 1, ray_address)
    attempt.until(lambda: 1 in attempt.steps(), "step 1")
    began = time.monotonic()
    attempt.process.terminate()
    assert attempt.wait() == 143, attempt.tail()
    assert time.monotonic() - began < 30
    assert checkpoints.choose(run).step >= 1


@pytest.mark.nightly
def test_when_nothing_is_mixed_it_stops_with_the_arithmetic(tmp_path, assets, ray_address):
    unmixed = write_reward(tmp_path, "return {'score': 1.0, 'acc': 1.0}")
    run = plan(tmp_path, {**assets, "reward.py": unmixed}, "exhausted", dapo__max_gen_batches=2)
    attempt = Attempt(run, 1, ray_address)
    assert attempt.wait() == 86, attempt.tail()
    assert "step 1: 2 generation(s) of 4 prompts gave 0 mixed groups of 8, 4 are needed" in attempt.error()
    assert attempt.steps() == []


@pytest.mark.nightly
def test_filled_groups_do_not_move_the_policy(tmp_path, assets, ray_address):
    """Unmixed in accuracy although overlong shaping differs within a group; without weight decay nothing moves."""
    unmixed = write_reward(tmp_path, "return {'score': 1.0, 'acc': 1.0}")
    run = plan(
        tmp_path,
        {**assets, "reward.py": unmixed},
        "filled",
        dapo__max_gen_batches=1,
        dapo__when_exhausted="fill",
        optimizer__weight_decay=0.0,
        deterministic=True,
    )
    attempt = Attempt(run, 1, ray_address, **deterministic_variables())
    assert attempt.wait() == 0, attempt.tail()
    assert [e["processes"] for e in run.events() if e["event"] == "deterministic"] == [2], "proven on every process"
    first, second = (line["weights"] for line in attempt.samples())
    assert first == second
    assert attempt.metric("train/groups_filled") == [4.0, 4.0]
    assert min(attempt.metric("critic/score/min")) < max(attempt.metric("critic/score/max"))


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_while_saving_is_told_and_costs_nothing_else(tmp_path, assets, ray_address):
    run = plan(tmp_path, assets, "full", checkpoint={"save_every": 1, "keep": 5})
    run.checkpoints.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", run.checkpoints], check=True)
    try:
        attempt = Attempt(run, 1, ray_address)
        assert attempt.wait() == 1, attempt.tail()
        assert "the disk filled up while the checkpoint of step 1 was written" in attempt.error()
        assert list(run.checkpoints.iterdir()) == []
    finally:
        subprocess.run(["umount", run.checkpoints], check=True)


def write_reward(folder: Path, body: str) -> Path:
    file = folder / "reward.py"
    file.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n    {body}\n")
    return file


def test_plan_json_is_all_that_the_trainer_is_told(whole):
    assert set(json.loads(whole.run.plan.read_text())) >= {"recipe", "nodes", "devices_per_node", "overrides"}
