"""An ablation of two factors for real: killed in the middle of its second run, the same command ends it."""

from __future__ import annotations

import pytest

from atlasrl import progress
from atlasrl.rundir import RunDir
from tests.job.conftest import job_processes, kill_job, wait_until

pytestmark = [pytest.mark.training, pytest.mark.nightly]

FACTORS = ["tiny", "--name", "factors", "--vary", "lr=2e-4,1e-4", "--vary", "dapo.clip_high=0.28,0.2"]
SMALL = ["backend=fsdp2", "parallel.expert=1", "steps=4", "checkpoint.save_every=1", "validate_every=0"]
OPTIONS = [*FACTORS, "--nodes", 1, *(word for change in SMALL for word in ("--set", change))]


def test_a_killed_ablation_is_ended_by_the_same_command(commands):
    folder = commands.runs / "factors"
    runs = [RunDir(folder / name) for name in ("00-base", "01-learning_rate-1e-4", "02-clip_high-0.2")]

    def second_run_saved():
        return runs[1].plan.is_file() and progress.of(runs[1]).checkpoint

    ablation = commands.start("ablate", *OPTIONS)
    wait_until(second_run_saved, 400, "a checkpoint of the second run")
    ablation.kill()
    kill_job(commands.runs)
    wait_until(lambda: not job_processes(commands.runs), 60, "the end of every process")
    assert progress.of(runs[1]).state == "died"

    done = commands.run("ablate", *OPTIONS, deadline=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [len(run.attempts()) for run in runs] == [1, 2, 1], "what was done stays done"
    assert [event["resume_from"] is not None for event in runs[1].events() if event["event"] == "submitted"] == [0, 1]
    assert all(sorted(progress.of(run).rewards) == [1, 2, 3, 4] for run in runs)
    page = (folder / "ablation.html").read_text()
    for row in ("00-base", "01-learning_rate-1e-4 (optimizer.learning_rate=1e-4)", "02-clip_high-0.2"):
        assert row in page and row in done.stdout
    wait_until(lambda: not job_processes(commands.runs), 60, "the end of every process")
