"""A job on a real two-node Ray cluster: whoever dies is named, nothing is left behind, the run can go on.

The stages are stand-ins that wait, since verl adds a minute and nothing to what is attacked here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import yaml

from atlasrl import plan as plans
from atlasrl.rundir import RunDir
from tests.job.conftest import job_processes, kill_job, wait_until
from tests.job.test_plan import TREE

pytestmark = pytest.mark.cluster

STAGE = """#!/usr/bin/env bash
case $0 in
    */train.sh) trap 'exit 143' TERM; echo training; until [ -e "$ATLASRL_RUN/finish" ]; do sleep 0.1; done ;;
    *) echo "skipped: a stand-in" ;;
esac
"""


@pytest.fixture
def job(commands, tmp_path):
    stages = tmp_path / "stages"
    stages.mkdir()
    for stage in plans.STAGES:
        (stages / f"{stage}.sh").write_text(STAGE)
    commands.environment["ATLASRL_STAGES"] = str(stages)
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump({**TREE, "nodes": 2}))
    job = Job(commands, recipe)
    yield job
    if job.run.writer():
        job.run.path.joinpath("finish").touch()
        wait_until(lambda: not job_processes(commands.runs), 60, "the job's end")


class Job:
    def __init__(self, commands, recipe):
        self.commands, self.recipe = commands, recipe
        self.run = RunDir(commands.runs / "job")

    def start(self) -> str:
        done = self.commands.run("train", self.recipe, "--name", "job", "--json")
        assert done.returncode == 0, done.stderr
        self.wait_for_training()
        return json.loads(done.stdout)["job"]

    def wait_for_training(self, attempt: int = 1) -> None:
        log = self.run.attempt(attempt).logs / "train-node0.log"
        outcome = self.run.attempt(attempt).outcome
        wait_until(lambda: outcome.exists() or (log.exists() and "training" in log.read_text()), 240, "the train stage")
        assert not outcome.exists(), outcome.read_text()

    def outcome(self, attempt: int = 1, deadline: float = 60) -> dict:
        path = self.run.attempt(attempt).outcome
        wait_until(path.exists, deadline, "the outcome")
        return json.loads(path.read_text())

    def process(self, *words: str) -> psutil.Process:
        """The one process of this job whose command line holds all words."""
        temp = str(plans.load(self.run).ray_temp(1, 0).parent)
        found = [
            process
            for process in psutil.process_iter(["cmdline"])
            if all(any(word in part for part in process.info["cmdline"] or []) for word in words)
            and any(temp in part or str(self.run.path) in part for part in process.info["cmdline"] or [])
        ]
        assert len(found) == 1, (words, found)
        return found[0]

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not job_processes(self.commands.runs), 60, f"no process of {self.run.path}")
        plan = plans.load(self.run)
        temps = [plan.ray_temp(attempt.number, 0).parent for attempt in self.run.attempts()]
        wait_until(lambda: not any(_uses(temp) for temp in temps), 30, "no Ray process")
        wait_until(lambda: not any(temp.exists() for temp in temps), 30, f"no folder of {temps}")
        assert self.run.writer() is None


def _uses(temp) -> bool:
    return any(str(temp) in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


def test_a_second_writer_is_refused_and_the_first_finishes_tells_its_story_and_leaves_nothing(job):
    job_id = job.start()
    names = [event["event"] for event in job.run.events()]
    assert names.index("ray_up") < len(names) - 1
    resources = next(event for event in job.run.events() if event["event"] == "ray_up")["resources"]
    assert {name: node["NPU"] for name, node in resources.items()} == {"node0": 1.0, "node1": 1.0}
    started = " ".join(word for process in job_processes(job.commands.runs) for word in process.cmdline())
    assert "raylet" in started and "ray.util.client.server" not in started, "it would run code for whoever reaches it"

    done = job.commands.run("resume", job_id)
    assert done.returncode == 1
    assert "is being written by" in done.stderr
    assert "bin/stop job" in done.stderr
    assert job.run.writer()

    (job.run.path / "finish").touch()
    assert job.outcome()["state"] == "done"
    job.assert_nothing_is_left()


def test_killed_head_raylet_is_named(job):
    job.start()
    job.process("gcs_server").kill()
    outcome = job.outcome()
    assert outcome["state"] == "failed"
    assert outcome["message"].startswith("node0: ")
    job.assert_nothing_is_left()


def test_killed_raylet_of_a_worker_node_is_named_within_seconds(job):
    job.start()
    job.process("raylet/raylet", "node_ip_address=127.0.1.2").kill()
    outcome = job.outcome(deadline=30)
    assert outcome["state"] == "failed"
    assert "node1" in outcome["message"]
    job.assert_nothing_is_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_node_process_killed_with_9_leaves_nothing(job, rank):
    job.start()
    nodes = [p for p in job_processes(job.commands.runs) if p.cmdline()[1:3] == ["-m", "atlasrl.node"]]
    next(p for p in nodes if p.cmdline()[-1] == str(rank)).kill()
    job.assert_nothing_is_left()
    status = json.loads(job.commands.run("status", "--json").stdout)[0]
    assert status["state"] == ("died" if rank == 0 else "failed")
    if rank == 1:
        assert "node1" in status["message"]


def test_controller_killed_with_9_takes_the_job_along(job):
    job_id = job.start()
    os.kill(int(job_id), signal.SIGKILL)
    job.assert_nothing_is_left()


def test_everything_killed_at_once_starts_over_by_job_id_only_when_told_to(job):
    job_id = job.start()
    kill_job(job.commands.runs)
    refused = job.commands.run("resume", job_id)
    assert refused.returncode == 1
    assert "--step 0" in refused.stderr, "no checkpoint yet"
    again = job.commands.run("resume", job_id, "--step", 0)
    assert again.returncode == 0, again.stderr
    job.wait_for_training(attempt=2)
    (job.run.path / "finish").touch()
    assert job.outcome(attempt=2)["state"] == "done"
    job.assert_nothing_is_left()


def test_ctrl_c_while_watching_ends_the_job(job):
    watching = job.commands.start("train", job.recipe, "--name", "job", "--follow", start_new_session=True)
    wait_until(job.run.journal.exists, 60, "the run")
    job.wait_for_training()
    os.killpg(watching.pid, signal.SIGINT)
    told, _ = watching.communicate(timeout=90)
    assert watching.returncode == 130
    assert "bin/resume job" in told
    assert job.outcome()["state"] == "stopped"
    job.assert_nothing_is_left()


def test_port_held_by_somebody_else_moves_the_job_names_the_holder_and_bin_stop_ends_it(job):
    plan = plans.make(plans.recipes.load(str(job.recipe)), plans.sites.load("local"), job.run)
    wanted = plans.planned_ports(plan, 1, 0)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", wanted.gcs))
        squatter.listen()
        job_id = job.start()
        ports = next(e for e in job.run.events() if e["event"] == "ports" and e["node"] == "node0")
        assert ports["gcs"] != wanted.gcs
        assert f"pid {os.getpid()}" in ports["reason"]
    assert job.commands.run("stop", job_id).returncode == 0
    job.assert_nothing_is_left()
    refused = job.commands.run("resume", job_id)
    assert refused.returncode == 1
    assert "--step 0" in refused.stderr, "a job that was stopped without a checkpoint does not start over silently"


FOREIGN = """
import ray
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000)
print("up", flush=True)
input()
print(ray.get(ray.remote(lambda: "alive").remote()))
"""


@pytest.mark.nightly
def test_foreign_ray_survives_our_whole_life(job):
    foreign = subprocess.Popen(
        [sys.executable, "-c", FOREIGN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert foreign.stdout.readline() == "up\n"
    job.start()
    assert job.commands.run("stop", "job").returncode == 0
    job.assert_nothing_is_left()
    assert foreign.communicate("\n", timeout=60)[0] == "alive\n"
