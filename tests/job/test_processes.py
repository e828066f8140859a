"""Our process tree ends completely, whoever dies first, and nobody else's is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import psutil

from atlasrl import processes
from tests.job.conftest import wait_until

# A parent that starts a child, which starts a grandchild in a session of its own; each writes its pid.
FAMILY = """
import subprocess, sys, os
open(sys.argv[1] + "/child", "w").write(str(os.getpid()))
code = "import os, sys, time; open(sys.argv[1] + '/grandchild', 'w').write(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True).wait()
"""

GUARDIAN = """
import sys, os
from pathlib import Path
from atlasrl import processes
processes.adopt_orphans()
folder, family = sys.argv[1:]
child = processes.spawn([sys.executable, "-c", family, folder], env=dict(os.environ), log=Path(folder) / "log")
child.wait()
processes.end_descendants(patience=1)
"""


def read_pid(file) -> int:
    return int(wait_until(lambda: file.exists() and file.read_text(), 30, str(file)))


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_guardian(folder) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(GUARDIAN), str(folder), FAMILY])


def test_grandchild_in_its_own_session_ends_when_its_parent_is_killed(tmp_path):
    guardian = start_guardian(tmp_path)
    child, grandchild = read_pid(tmp_path / "child"), read_pid(tmp_path / "grandchild")
    os.kill(child, signal.SIGKILL)
    guardian.wait(30)
    assert is_gone(grandchild)


def test_child_dies_with_a_killed_guardian(tmp_path):
    guardian = start_guardian(tmp_path)
    child = read_pid(tmp_path / "child")
    grandchild = read_pid(tmp_path / "grandchild")
    guardian.kill()
    guardian.wait()
    try:
        wait_until(lambda: is_gone(child), 30, "the child's death signal")
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_end_tree_kills_what_ignores_sigterm(tmp_path):
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    child = processes.spawn([sys.executable, "-c", stubborn], env=dict(os.environ), log=log)
    wait_until(lambda: log.exists() and "up" in log.read_text(), 30, "the child")
    processes.end_tree(child, patience=0.2)
    assert is_gone(child.pid)


def test_sigusr2_does_not_end_children(tmp_path):
    log = tmp_path / "log"
    code = "import time; print('up', flush=True); time.sleep(600)"
    child = processes.spawn([sys.executable, "-c", code], env=dict(os.environ), log=log)
    wait_until(lambda: log.exists() and "up" in log.read_text(), 30, "the child")
    child.send_signal(signal.SIGUSR2)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == -signal.SIGTERM


def test_identity_is_not_fooled_by_a_pid_that_came_back():
    me = processes.identity(os.getpid())
    assert processes.is_alive(me)
    assert not processes.is_alive({**me, "started": me["started"] - 100})
    assert not processes.signal_process({**me, "started": me["started"] - 100}, signal.SIGKILL)


def test_leftovers_are_found_by_folder_and_not_by_a_longer_name(tmp_path):
    code = "import time; time.sleep(600)"
    ours = subprocess.Popen([sys.executable, "-c", code, f"--temp-dir={tmp_path}/a/session"])
    other = subprocess.Popen([sys.executable, "-c", code, f"--temp-dir={tmp_path}/ab/session"])
    try:
        found = wait_until(lambda: [p.pid for p in processes.leftovers(tmp_path / "a")], 30, "our process")
        assert found == [ours.pid]
    finally:
        ours.kill()
        other.kill()
        ours.wait()
        other.wait()
