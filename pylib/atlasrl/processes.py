"""Our own process tree: start children that cannot outlive us, end them all, and touch nobody else's.

A node runs a tree such as: task (submitit) -> node -> {ray start --block -> gcs_server, raylet -> workers} and a stage
script -> trainer. Two rules keep the tree together whatever dies first:

- `adopt_orphans` makes a process the parent of all descendants whose own parent dies (PR_SET_CHILD_SUBREAPER). The task
  and the node both do so, hence each of them can end everything below when the other is killed.
- `spawn` gives a child a death signal (PR_SET_PDEATHSIG), its own session, and SIGUSR2 ignored: Slurm sends that signal
  to every process of a step, and its default would kill Ray and the trainer at once.

Linux only, as are Slurm and Ascend. Source: prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(
    command: Sequence[str], *, env: dict[str, str], log: Path | IO, death_signal: int = signal.SIGKILL, **options
) -> subprocess.Popen:
    """Start a child in its own session that gets `death_signal` when the calling thread's process ends.

    Args:
        command: the words of the command; no shell.
        env: its whole environment.
        log: file that standard output and error are appended to, or an open stream for both.
    """
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # stays ignored over exec, for all descendants
        _libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(log.open("ab")) if isinstance(log, Path) else log
        return subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=options.pop("stdout", stream),
            stderr=stream,
            start_new_session=True,
            preexec_fn=prepare,
            **options,
        )


def identity(pid: int) -> dict | None:
    """{"pid", "started"}: names a process beyond the reuse of its pid. None when there is no such process."""
    try:
        return {"pid": pid, "started": psutil.Process(pid).create_time()}
    except psutil.NoSuchProcess:
        return None


def is_alive(who: dict | None) -> bool:
    """Whether the process that `identity` named still runs (a zombie does not)."""
    process = _process(who)
    return process is not None and _runs(process)


def _process(who: dict | None) -> psutil.Process | None:
    try:
        process = psutil.Process(int(who["pid"])) if who else None
    except psutil.NoSuchProcess:
        return None
    if process is None or abs(process.create_time() - who["started"]) > 1:  # boot time is corrected now and then
        return None
    return process


def signal_process(who: dict | None, number: int) -> bool:
    """Send a signal to exactly the process that `identity` named; False when it is gone."""
    process = _process(who)
    try:
        if process is None:
            return False
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def end(processes: Sequence[psutil.Process], patience: float) -> None:
    """SIGTERM, wait `patience` seconds, SIGKILL what is left, and wait until it is gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    left = _wait_for_end(processes, patience)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_for_end(left, 10)


def _wait_for_end(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run in the end. A zombie has ended: psutil would wait for its parent to collect it."""
    limit = time.monotonic() + seconds
    while (left := [each for each in processes if _runs(each)]) and time.monotonic() < limit:
        time.sleep(0.02)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_tree(root: subprocess.Popen, patience: float) -> None:
    """End a child and all its descendants; orphans of it that we adopted are ended by `end_descendants`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root.pid)
        end([process, *process.children(recursive=True)], patience)
    with contextlib.suppress(subprocess.TimeoutExpired):
        root.wait(timeout=10)


def end_descendants(patience: float, deadline: float = 30) -> int:
    """End every process below this one, in as many rounds as it takes (a dying parent can still fork).

    Returns:
        The number of processes that were still there.
    """
    ended, limit = 0, time.monotonic() + deadline
    while time.monotonic() < limit:
        children = [child for child in psutil.Process().children(recursive=True) if _runs(child)]
        if not children:
            break
        ended += len(children)
        end(children, patience)
        patience = 0.5
    reap()
    return ended


def reap() -> None:
    """Collect the exit codes of adopted children, so that they do not stay as zombies."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def leftovers(folder: Path) -> list[psutil.Process]:
    """Processes of this user that name `folder` (a Ray temp folder of ours) on their command line."""
    prefix, found = f"{folder}/", []
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or []
        own = process.info["uids"] is not None and process.info["uids"].real == os.getuid()
        if own and any(prefix in f"{word}/" for word in words) and process.pid != os.getpid():
            found.append(process)
    return found
