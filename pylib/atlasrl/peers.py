"""One node's view of its attempt: what it says to the others, what it hears of them, and when it is asked to end.

Nodes talk through small files in the attempt's folder, which all of them see; no port has to be open for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from atlasrl import processes
from atlasrl.errors import Fault
from atlasrl.outcome import STOPPED
from atlasrl.plan import Plan
from atlasrl.rundir import AttemptDir, RunDir, write_atomically

POLL_SECONDS = 0.1
CLOSING = ("closing", "ended", "failed")
HOST = os.uname().nodename


class Stopped(Fault):
    """Somebody asked the attempt to end."""

    exit_code = STOPPED


@dataclass
class Node:
    """One node's view of its attempt."""

    plan: Plan
    attempt: AttemptDir
    rank: int

    @property
    def name(self) -> str:
        return f"node{self.rank}"

    @property
    def run(self) -> RunDir:
        return self.attempt.run

    def log(self, what: str, rank: int | None = None) -> Path:
        return self.attempt.logs / f"{what}-node{self.rank if rank is None else rank}.log"

    def say(self, state: str, message: str = "") -> None:
        """Tell the other nodes and the log what this node does."""
        path = self.attempt.node(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        said = {"state": state, "message": message, "host": HOST, **processes.identity(os.getpid())}
        write_atomically(path, json.dumps(said) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {self.name} {state} {message}".rstrip(), flush=True)

    def heard_of(self, rank: int) -> dict:
        """What another node said last; `died` when it lived on this host and its process is gone."""
        try:
            said = json.loads(self.attempt.node(rank).read_text())
        except (OSError, ValueError):
            return {"state": "silent", "message": "its task has not started"}
        if said["host"] == HOST and said["state"] not in ("ended", "failed") and not processes.is_alive(said):
            return {
                "state": "died",
                "message": f"node{rank}: its process {said['pid']} is gone; it was: {said['state']}",
            }
        return said


_signals: list[int] = []


def note_signals() -> None:
    """Turn SIGTERM and SIGINT into a note that `check_interrupted` finds; SIGUSR2 is Slurm's and ignored."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: _signals.append(received))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def check_interrupted(node: Node, *, saves_itself: bool = False) -> None:
    """Raise Stopped when a signal came or, on rank 0, a stop was requested: the others must stay while it saves.

    `saves_itself`: the running stage sees a stop request that asks for a checkpoint and ends by itself.
    """
    if _signals:
        raise Stopped(f"{node.name} received {signal.Signals(_signals[0]).name}")
    if node.rank == 0 and node.attempt.stop_request.exists():
        with contextlib.suppress(OSError, ValueError):
            if saves_itself and json.loads(node.attempt.stop_request.read_text()).get("save"):
                return
        raise Stopped("stopped on request")
