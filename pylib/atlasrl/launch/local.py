"""This machine as a cluster: submitit's LocalExecutor, one task per node.

The submitting command must be able to return, or to be interrupted, without taking the job along: submitit's controller
is started from a helper process in a session of its own, with its output in a file.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import submitit

from atlasrl import plan as plans
from atlasrl import processes
from atlasrl.errors import Fault
from atlasrl.launch.task import NodeTask
from atlasrl.plan import Plan
from atlasrl.rundir import AttemptDir, RunDir, write_atomically

MINUTES = 60 * 24 * 30  # submitit wants a time limit; a local job has none


def submit(plan: Plan, attempt: AttemptDir) -> str:
    """Start the job and return its id, the pid of submitit's controller.

    Raises:
        Fault: the controller did not start.
    """
    answer = attempt.path / "controller"
    with (attempt.logs / "launch.log").open("ab") as log:
        code = subprocess.run(
            [sys.executable, "-m", "atlasrl.launch.local", str(attempt.run.path), str(attempt.number)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=False,
        ).returncode
    if code != 0:
        raise Fault(f"the job could not be started; see {attempt.logs / 'launch.log'}")
    return str(json.loads(answer.read_text())["pid"])


def is_alive(attempt: AttemptDir, job: dict) -> bool:
    """Whether the controller of an attempt still runs."""
    try:
        return processes.is_alive(json.loads((attempt.path / "controller").read_text()))
    except (OSError, ValueError):
        return False


def cancel(attempt: AttemptDir, job: dict) -> None:
    """SIGTERM to the controller, which forwards it to its tasks."""
    processes.signal_process(json.loads((attempt.path / "controller").read_text()), signal.SIGTERM)


def start_controller(plan: Plan, attempt: AttemptDir) -> None:
    """In the helper process: hand the tasks to submitit and leave its controller behind."""
    executor = submitit.LocalExecutor(folder=attempt.path / "submitit")
    executor.update_parameters(tasks_per_node=plan.nodes, timeout_min=MINUTES, signal_delay_s=60)
    job = executor.submit(NodeTask(plan.run, attempt.number, str(plan.ray_temp(attempt.number, 0).parent)))
    write_atomically(attempt.path / "controller", json.dumps(processes.identity(int(job.job_id))) + "\n")


if __name__ == "__main__":
    run = RunDir(sys.argv[1])
    start_controller(plans.load(run), run.attempt(int(sys.argv[2])))
