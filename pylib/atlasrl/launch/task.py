"""What submitit runs once per node: a thin parent of node.main that outlives it and cleans up after it.

The task adopts every process that loses its parent, so that a node killed with SIGKILL leaves nothing behind, and dies
with its scheduler process in turn.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import submitit

from atlasrl import processes, raycluster
from atlasrl.rundir import RunDir


class NodeTask:
    """Picklable; holds only paths and numbers, so that a pickle of any age means the same."""

    def __init__(self, run: str, attempt: int, temp: str):
        self.run, self.attempt, self.temp = run, attempt, temp

    def __call__(self) -> int:
        environment = submitit.JobEnvironment()
        processes.adopt_orphans()
        ctypes.CDLL(None).prctl(processes.PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        rank = environment.global_rank
        node = processes.spawn(
            [sys.executable, "-m", "atlasrl.node", self.run, str(self.attempt), str(rank)],
            env={**os.environ, "ATLASRL_JOB": environment.job_id},
            log=RunDir(self.run).attempt(self.attempt).logs / f"node{rank}.log",
            death_signal=signal.SIGTERM,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: node.send_signal(signal.SIGTERM))
        code = node.wait()
        processes.end_descendants(patience=2)
        raycluster.remove_temp(Path(self.temp) / str(rank))  # a node that was killed could not
        if code != 0:
            raise SystemExit(code if code > 0 else 128 - code)
        return code
