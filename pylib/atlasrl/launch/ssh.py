"""Hosts without a scheduler: one supervisor per host, started over ssh, that outlives the connection.

The first hosts of the site's list that answer get the job, in that order; further ones are spares for the next attempt.
Nothing needs ssh once the supervisors run: they speak through the shared run directory.
"""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.launch import canary
from atlasrl.launch.supervisor import JobTask
from atlasrl.plan import Plan
from atlasrl.rundir import AttemptDir, RunDir, write_atomically
from atlasrl.site import Ssh

CONNECT_SECONDS = 10
ANSWER_SECONDS = 60
LATELY_SECONDS = 5
OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "-o", "LogLevel=ERROR")

# Runs on a host. The process is named by its pid and its start time, so that nobody else's is ever signalled.
START = r"""
log=$1; shift
cd "$(dirname "$log")" || exit 1
setsid nohup "$@" >>"$log" 2>&1 </dev/null &
# only in a session of its own is it safe from the end of this connection
while kill -0 $! 2>/dev/null && [ "$(sed 's/.*) //' /proc/$!/stat | cut -d' ' -f4)" != $! ]; do :; done
echo "started $! $(sed 's/.*) //' /proc/$!/stat | cut -d' ' -f20)"
""".strip()
IS_ALIVE = r"""
[ "$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20)" = "$2" ] && echo alive || echo gone
""".strip()
TERMINATE = IS_ALIVE.replace("&& echo alive", '&& kill -TERM "$1" && echo told')


def command(ssh: Ssh, host: str, *words: str) -> list[str]:
    """A local command line that runs a shell script from standard input on a host, with arguments."""
    login = [*(["-l", ssh.user] if ssh.user else []), *(["-p", str(ssh.port)] if ssh.port else [])]
    return ["ssh", *OPTIONS, *login, *ssh.options, "--", host, shlex.join(["bash", "-s", "--", *words])]


def ask(ssh: Ssh, host: str, script: str, *words: str) -> tuple[bool, str]:
    """Run a script on a host; whether it succeeded, and its last line of output."""
    try:
        answer = subprocess.run(
            command(ssh, host, *words),
            input=f"SLURMD_NODENAME={shlex.quote(host)}\n{script}\n",  # the name by which the canary speaks
            capture_output=True,
            text=True,
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"error: {host}: no answer over ssh within {ANSWER_SECONDS} s"
    except FileNotFoundError:
        raise Fault("ssh is not installed on this machine") from None
    lines = (answer.stdout if answer.returncode == 0 else answer.stderr).strip().splitlines()
    words_said = lines[-1] if lines else f"exit code {answer.returncode}"
    if answer.returncode == 255:  # ssh's own failures
        words_said = f"error: {host}: ssh: {words_said}"
    return answer.returncode == 0, words_said


def ask_all(ssh: Ssh, hosts: Sequence[str], script: str, arguments) -> dict[str, tuple[bool, str]]:
    """Ask hosts at the same time; `arguments(host)` are the script's."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(lambda host: ask(ssh, host, script, *arguments(host)), hosts), strict=True))


# --- the launcher -----------------------------------------------------------------------------------------------------


def preview(plan: Plan) -> str:
    """What would be run where, as text."""
    check(plan)
    hosts = plan.site.ssh.hosts
    lines = ["", f"hosts        {', '.join(hosts[: plan.nodes])}"]
    if spares := hosts[plan.nodes :]:
        lines.append(f"spares       {', '.join(spares)}")
    lines.append(shlex.join(command(plan.site.ssh, hosts[0], *_task_words(plan, "JOB", hosts[: plan.nodes], 0))))
    return "\n".join(lines)


def submit(plan: Plan, attempt: AttemptDir) -> str:
    """Start the supervisors and return the job id.

    Raises:
        Fault: fewer hosts than nodes are fit; each unfit one is named with its reason.
    """
    from atlasrl.launch.ssh_executor import SshExecutor

    check(plan)
    hosts, token, folder = plan.site.ssh.hosts, secrets.token_hex(8), folder_of(plan)
    canary.place(folder, token)
    words = [str(folder), token, plan.python, *map(str, canary.needed_by(plan))]
    answers = ask_all(plan.site.ssh, hosts, canary.CANARY, lambda host: words)
    unfit = [said.removeprefix("error: ") for fit, said in answers.values() if not fit]
    chosen = [host for host, (fit, _) in answers.items() if fit][: plan.nodes]
    if len(chosen) < plan.nodes:
        raise Fault(f"{plan.nodes} hosts are needed and {len(chosen)} of {len(hosts)} are fit: {'; '.join(unfit)}")
    executor = SshExecutor(plan, chosen, folder)
    job = executor.submit(JobTask(plan.run, attempt.number, token))
    plan.rundir.record("hosts", attempt=attempt.number, job=job.job_id, hosts=chosen, unfit=unfit)
    return job.job_id


def start_tasks(plan: Plan, job: str, hosts: list[str]) -> None:
    """Start one task per host; when one cannot start, end those that did. Raises Fault."""
    ranks = {host: rank for rank, host in enumerate(hosts)}
    answers = ask_all(plan.site.ssh, hosts, START, lambda host: _task_words(plan, job, hosts, ranks[host]))
    started = []
    for host, (succeeded, said) in answers.items():
        if succeeded and said.startswith("started "):
            _, pid, at = said.split()
            started.append({"host": host, "pid": pid, "started": at})
    write_atomically(
        _record_of(plan.rundir, job), json.dumps({"ssh": plan.site.ssh.model_dump(), "tasks": started}) + "\n"
    )
    if failed := [f"{host}: {said}" for host, (succeeded, said) in answers.items() if not succeeded]:
        _tell(plan.rundir, job, TERMINATE)
        raise Fault(f"the job could not be started on all hosts: {'; '.join(failed)}")


def is_alive(attempt: AttemptDir, job: dict) -> bool:
    """Whether the supervisor on the first host still runs; asked at most every few seconds."""
    asked, known = _lately.get(job["id"], (float("-inf"), False))
    if time.monotonic() - asked > LATELY_SECONDS:
        known = bool(job.get("id")) and "alive" in _tell(attempt.run, job["id"], IS_ALIVE, first_only=True)
        _lately[job["id"]] = time.monotonic(), known
    return known


def cancel(attempt: AttemptDir, job: dict) -> None:
    """SIGTERM to every supervisor of the job, and to no other process."""
    _tell(attempt.run, job["id"], TERMINATE)


_lately: dict[str, tuple[float, bool]] = {}


def _tell(run: RunDir, job: str, script: str, *, first_only: bool = False) -> list[str]:
    """Run a script for each task of a job, on its host; what they said."""
    try:
        record = json.loads(_record_of(run, job).read_text())
    except (OSError, ValueError):
        return []
    tasks = {task["host"]: task for task in record["tasks"][: 1 if first_only else None]}
    if not tasks:
        return []
    ssh = Ssh.model_validate(record["ssh"])
    answers = ask_all(ssh, list(tasks), script, lambda host: [tasks[host]["pid"], tasks[host]["started"]])
    return [said for _, said in answers.values()]


def folder_of(plan: Plan) -> Path:
    """Where submitit and the tasks write."""
    return Path(plan.run) / "ssh"


def _record_of(run: RunDir, job: str) -> Path:
    return run.path / "ssh" / f"{job}_tasks.json"


def check(plan: Plan) -> None:
    """Refuse, before anything is made, what could not be started. Raises UsageFault."""
    canary.refuse_node_local(Path(plan.run))
    hosts = plan.site.ssh.hosts
    if len(set(hosts)) != len(hosts):
        raise UsageFault("a host stands twice in the site's ssh.hosts; each host is one node")
    if len(hosts) < plan.nodes:
        raise UsageFault(f"{plan.nodes} nodes are asked for and the site lists {len(hosts)} hosts; lower --nodes")


def _task_words(plan: Plan, job: str, hosts: list[str], rank: int) -> list[str]:
    """The log and the command of one task."""
    folder = folder_of(plan)
    variables = {
        "PYTHONPATH": str(plan.environment["PYTHONPATH"].value),
        "SUBMITIT_EXECUTOR": "ssh",
        "ATLASRL_SSH_JOB": job,
        "ATLASRL_SSH_RANK": str(rank),
        "ATLASRL_SSH_HOSTS": ",".join(hosts),
    }
    shell = "".join(f"{line}\n" for line in plan.site.setup) + f'exec {shlex.quote(plan.python)} "$@"'
    task = ["-u", "-m", "atlasrl.launch.ssh_executor", str(folder)]
    log = str(folder / f"{job}_{rank}_log.out")
    return [log, "env", *(f"{name}={value}" for name, value in variables.items()), "bash", "-c", shell, "task", *task]
