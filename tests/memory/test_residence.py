"""Resident memory of a run, sampled from outside: which process, which phase, how much it grew."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from atlasrl.errors import UsageFault
from atlasrl.memory import residence, rss
from atlasrl.rundir import RunDir

MIB = 2**20
UPDATE = "ray::WorkerDict.actor_rollout_update_actor"


def line(pid, name, mib, time=0.0):
    return {"time": time, "pid": pid, "name": name, "rss": mib * MIB, "peak": mib * MIB}


def test_a_phase_grows_from_what_the_process_held_when_it_began():
    found = residence.phases(
        [
            line(1, "ray::IDLE", 500),
            line(1, UPDATE, 510),
            line(1, UPDATE, 600),
            line(1, "ray::IDLE", 550),
            line(2, UPDATE, 900),
            line(1, UPDATE, 560),
            line(1, UPDATE, 650),
        ]
    )
    update = found[1, UPDATE]
    assert (update.times, update.peak, update.growths) == (2, 650 * MIB, [100 * MIB, 100 * MIB])
    assert found[2, UPDATE].growths == [0], "the memory of another process is none of its own"
    assert next(iter(found)) == (1, "ray::IDLE")


def test_the_newest_attempt_with_samples_is_read_and_none_is_said(tmp_path):
    run = RunDir(tmp_path / "run")
    for number in (1, 2, 3):
        run.attempt(number).path.mkdir(parents=True)
    with pytest.raises(UsageFault, match="train it with --set probe"):
        residence.sampled_attempt(run)
    for number in (1, 2):
        run.attempt(number).memory(0).write_text(json.dumps(line(number, UPDATE, 200)) + "\n")
    (told,) = residence.lines(residence.sampled_attempt(run))
    assert told.split()[:2] == ["node0", "2"]
    assert UPDATE in told and "200.0 MiB" in told


def test_small_processes_are_one_line(tmp_path):
    run = RunDir(tmp_path / "run")
    run.attempt(1).path.mkdir(parents=True)
    samples = [line(1, UPDATE, 200), *(line(pid, "bash", 3) for pid in range(10, 40))]
    run.attempt(1).memory(0).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    told = list(residence.lines(residence.sampled_attempt(run)))
    assert len(told) == 2
    assert "30 more processes, none above 3 MiB" in told[1]


def test_a_ray_worker_is_sampled_under_the_name_of_what_it_does(tmp_path):
    """Ray puts the method into the command line; the kernel's own name of a process ends after 15 letters."""
    busy = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'ray::WorkerDict', 0, 0, 0);"
        "print('named', flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen(
        [UPDATE, "-c", busy], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    file = tmp_path / "memory-node0.jsonl"
    sampler = threading.Thread(target=rss.sample, args=(process.pid, file, 0.02), daemon=True)
    sampler.start()
    while not (file.exists() and file.read_text().endswith("\n")) and sampler.is_alive():
        sampler.join(0.01)
    process.communicate(b"\n")
    sampler.join(20)
    assert not sampler.is_alive()
    assert {json.loads(row)["name"] for row in file.read_text().splitlines()} == {UPDATE}
