"""Slurm through submitit: the batch script as a pure function, and the executor that submits it.

What submitit's defaults would do to a job of many nodes, and what is done here instead:
`wckey=submitit` fails where wckeys are checked: none unless asked; one dead task leaves the others waiting for the time
limit: --kill-on-bad-exit; the warning signal 90 s before the end is shorter than a save: the lead time is given; a log
folder that a node does not see makes Slurm fail without a word: a canary step names the node first.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.launch import canary, squeue
from atlasrl.launch.supervisor import JobTask, lead_seconds
from atlasrl.plan import Plan
from atlasrl.rundir import AttemptDir
from atlasrl.site import Site, minutes_of


def parameters(
    site: Site,
    *,
    nodes: int,
    name: str,
    python: Path,
    folder: Path,
    token: str,
    lead_seconds: int,
    needed: list[Path],
    pythonpath: str,
) -> dict:
    """Parameters of submitit's SlurmExecutor.

    Args:
        name: of the run, and so of the job.
        python: interpreter of the tasks, as the nodes see it.
        folder: where Slurm and submitit write.
        token: of the canary file there.
        lead_seconds: how long before the time limit SIGUSR2 is sent to the tasks.
        needed: paths that every node must see.
        pythonpath: where the tasks find this package; not taken from the submitting shell.

    Raises:
        UsageFault: the time limit leaves no time to train before the warning.
    """
    slurm = site.slurm
    minutes = minutes_of(slurm.time)
    if lead_seconds >= 60 * minutes / 2:
        raise UsageFault(
            f"time limit {slurm.time} ({minutes} min) is too short: the job must save {lead_seconds / 60:.0f} min "
            "before its end; raise slurm.time or set life.save_minutes in the site file"
        )
    options = {
        "chdir": str(folder),
        "requeue": None if "--no-requeue" in slurm.extra else True,
        "comment": f"atlasrl {folder.parent}",
        "reservation": slurm.reservation,
        "wckey": slurm.wckey,
        **{key.removeprefix("--"): value or True for key, _, value in (line.partition("=") for line in slurm.extra)},
    }
    check = ["bash", "-c", canary.CANARY, "canary", str(folder), token, str(python), *map(str, needed)]
    step = ["srun", "--kill-on-bad-exit=0", "--quiet", "--input=none", *check]
    srun = ["--kill-on-bad-exit=1", "--wait=60", "--cpu-bind=none"]  # a task is a node's supervisor: all its CPUs
    if slurm.cpus_per_node:
        srun.append(f"--cpus-per-task={slurm.cpus_per_node}")  # since Slurm 22.05 srun does not take it from the job
    return {
        "job_name": name,
        "nodes": nodes,
        "ntasks_per_node": 1,
        "time": minutes,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "gres": slurm.gres,
        "exclusive": slurm.exclusive or None,
        "cpus_per_task": slurm.cpus_per_node,
        "mem": slurm.memory,
        "wckey": None,
        "signal_delay_s": lead_seconds,
        "stderr_to_stdout": True,
        "setup": [
            "# each node sees the run, the interpreter and the inputs, or is named here",
            f"{shlex.join(step)} || exit 1",
            *site.setup,
            f"export PYTHONPATH={shlex.quote(pythonpath)}",
        ],
        "srun_args": srun,
        "additional_parameters": {key: value for key, value in options.items() if value is not None},
    }


def batch_text(parameters: dict, *, python: Path, folder: Path) -> str:
    """The exact text that would be submitted. Pure."""
    from submitit.slurm.slurm import _make_sbatch_string

    return _make_sbatch_string(command=_command(python, folder), folder=folder, **parameters)


def _command(python: Path, folder: Path) -> str:
    return shlex.join([str(python), "-u", "-m", "submitit.core._submit", str(folder)])


def check(plan: Plan) -> None:
    """Refuse, before anything is made, what could not be submitted. Raises UsageFault."""
    job_parameters(plan, "")


def job_parameters(plan: Plan, token: str) -> dict:
    """Parameters of the batch job of a plan. Raises UsageFault."""
    canary.refuse_node_local(Path(plan.run))
    return parameters(
        plan.site,
        nodes=plan.nodes,
        name=plan.rundir.name,
        python=Path(plan.python),
        folder=folder_of(plan),
        token=token,
        lead_seconds=round(lead_seconds(plan.rundir, plan.site.life)[0]),
        needed=canary.needed_by(plan),
        pythonpath=str(plan.environment["PYTHONPATH"].value),
    )


def folder_of(plan: Plan) -> Path:
    """Where Slurm and submitit write."""
    return Path(plan.run) / "slurm"


def preview(plan: Plan) -> str:
    """The batch script of a plan, as `bin/train --dry-run` shows it; the token is new for each submission."""
    return "\nbatch script\n" + batch_text(
        job_parameters(plan, "TOKEN"), python=Path(plan.python), folder=folder_of(plan)
    )


def submit(plan: Plan, attempt: AttemptDir) -> str:
    """Hand an attempt to Slurm and return the job id.

    Raises:
        Fault: no Slurm client here, or Slurm refuses the job; the message is Slurm's own.
    """
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise Fault("sbatch and srun are not on this machine; submit where the Slurm client is, or use --site local")
    from submitit import SlurmExecutor
    from submitit.core.utils import FailedJobError

    folder, token = folder_of(plan), secrets.token_hex(8)
    chosen = job_parameters(plan, token)
    canary.place(folder, token)
    executor = SlurmExecutor(folder, python=shlex.quote(plan.python))
    executor.parameters.update(chosen)  # update_parameters() would convert sizes and refuse None
    try:
        job = executor.submit(JobTask(plan.run, attempt.number, token))
    except (FailedJobError, subprocess.CalledProcessError) as problem:
        raise Fault(
            f"Slurm refuses the job: {_last_words(problem)}; the script is that of bin/train --dry-run"
        ) from None
    return job.job_id


def _last_words(problem: Exception) -> str:
    lines = [line for line in str(problem).splitlines() if line.strip()]
    told = [line for line in lines if "error" in line]
    return (told or lines or [type(problem).__name__])[-1].strip()


def is_alive(attempt: AttemptDir, job: dict) -> bool:
    """Whether the job of an attempt is queued, running, or coming back."""
    state = squeue.state_lately(job["id"]) if job.get("id") else None
    return state is not None and state.is_alive


def describe(job: dict) -> str:
    """What Slurm says of a job, for bin/status; also where it does not answer."""
    try:
        state = squeue.state_lately(job["id"]) if job.get("id") else None
    except Fault as fault:
        return f"Slurm: {fault}"
    if state is None:
        return f"Slurm does not know job {job.get('id')} any more"
    waits = f" ({state.reason})" if state.state in squeue.WAITING else ""
    return f"Slurm: {state.state}{waits}"


def is_waiting(job: dict) -> bool:
    """Whether a job waits in the queue, new or requeued: no process of it reads a stop request."""
    state = squeue.state_lately(job["id"]) if job.get("id") else None
    return state is not None and state.state in squeue.WAITING


def cancel(attempt: AttemptDir, job: dict) -> None:
    """scancel; Slurm sends SIGTERM, waits KillWait, and sends SIGKILL. Raises Fault."""
    answer = subprocess.run(["scancel", job["id"]], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        raise Fault(f"Slurm does not cancel job {job['id']}: {answer.stderr.strip()}")
