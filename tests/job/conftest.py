"""The commands as a person runs them, on runs in a folder of the test."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], object], deadline: float, what: str):
    """Poll a condition; its first true value is returned."""
    limit = time.monotonic() + deadline
    while time.monotonic() < limit:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {deadline:.0f} s in vain: {what}")


class Commands:
    """bin/* against one folder of runs."""

    def __init__(self, runs: Path):
        self.runs = runs
        self.environment = {**os.environ, "ATLASRL_RUNS": str(runs)}

    def words(self, verb: str, *options: object) -> list[str]:
        return [str(ROOT / "bin" / verb), *map(str, options)]

    def run(self, verb: str, *options: object, deadline: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(verb, *options),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=deadline,
            check=False,
        )

    def call(self, verb: str, *options: object) -> Result:
        """As `run`, without a process of its own: it saves the imports, a second each."""
        main = importlib.import_module(f"atlasrl.cli.{verb}").main
        return CliRunner(env={"ATLASRL_RUNS": self.environment["ATLASRL_RUNS"]}).invoke(main, [*map(str, options)])

    def start(self, verb: str, *options: object, **more) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(verb, *options),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **more,
        )


def job_processes(runs: Path) -> list[psutil.Process]:
    """Every process that carries a run of this folder in its environment or command line."""
    found, mark = [], str(runs)
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ().get("ATLASRL_RUN", "")
            if environment.startswith(mark) or any(mark in word for word in process.cmdline()[2:]):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def kill_job(runs: Path) -> None:
    """kill -9 of every process of the runs; the death of one takes others along."""
    for process in job_processes(runs):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture
def commands(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    yield Commands(runs)
    kill_job(runs)  # a failing test must not leave its cluster to the next one
