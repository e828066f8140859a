"""The run directory: every path of a run in one place, and the journal that tells its story.

    runs/<name>/
        recipe.yaml            the recipe as it was given
        plan.json              recipe + site + flags, fully resolved
        journal.jsonl          append-only: attempts, stages, checkpoints
        owner.lock, owner.json who is writing now
        input/                 what the recipe's input script made
        model/                 the BF16 checkpoint that training starts from
        checkpoints/           global_step_N/ with a COMPLETE manifest each
        tensorboard/           event files of all attempts
        export/                the final Hugging Face checkpoint
        rollouts/              recorded answers, one file a step (rollout.record)
        attempts/0001/         one folder per attempt: logs, metrics, stop request

Everything here is text or JSON; nothing needs a pickle to be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from atlasrl.errors import Fault, UsageFault

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write beside, fsync, rename: a reader sees the old file or the new one, never a part."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def read_json_lines(path: Path) -> Iterator[dict]:
    """Yield the complete lines of a JSONL file that may still be written to.

    A last line without its newline is still being written, or was cut by a crash, and is left out.

    Raises:
        Fault: a complete line is not JSON; the message names file and line.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise Fault(
                    f"{path}:{number} is not a JSON object; the file was edited or damaged. "
                    "Everything before that line is intact: move the line away and run the command again"
                )
            yield record


class AttemptDir:
    """Paths of one attempt: one scheduler job, requeue or in-place restart of a run."""

    def __init__(self, run: RunDir, number: int):
        self.run, self.number = run, number
        self.path = run.path / "attempts" / f"{number:04d}"

    @property
    def logs(self) -> Path:
        """node<rank>.log, ray-<rank>.log and <stage>.log files."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON line per training step: {"step": int, "data": {tag: float}} (verl's file logger)."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON line per step: hashes of prompts, responses and synchronised weights."""
        return self.path / "samples.jsonl"

    @property
    def weights(self) -> Path:
        """Digests of the first weight syncs, one file a worker (probe.syncs)."""
        return self.path / "weights"

    def memory(self, rank: int) -> Path:
        """One JSON line per process of a node whose resident memory moved (recipe: probe.memory)."""
        return self.path / f"memory-node{rank}.jsonl"

    @property
    def workers(self) -> Path:
        """What the tensors and phases of every worker take, one file a worker (recipe: probe.memory, on a CPU)."""
        return self.path / "workers"

    @property
    def stop_request(self) -> Path:
        """Present when someone asked the attempt to end: {"save": bool}."""
        return self.path / "stop.json"

    @property
    def head(self) -> Path:
        """Where rank 0's Ray listens; written when it answers, read by the other ranks."""
        return self.path / "head.json"

    @property
    def job(self) -> Path:
        """What was submitted: job id, command, versions. Read instead of submitit's pickles."""
        return self.path / "job.json"

    @property
    def cluster(self) -> Path:
        """Which nodes Ray sees; kept by rank 0."""
        return self.path / "cluster.json"

    def node(self, rank: int) -> Path:
        """What a node does just now, or why it gave up: {"state": str, "message": str, ...}."""
        return self.path / "nodes" / f"node{rank}.json"

    @property
    def outcome(self) -> Path:
        """How the attempt ended; written by rank 0, last, and completed by its supervisor where there is one."""
        return self.path / "outcome.json"

    def ending(self) -> dict | None:
        """The whole outcome: {"state", "exit", "message"}, and "kind" and "action" of a supervised job."""
        try:
            outcome, job = json.loads(self.outcome.read_text()), json.loads(self.job.read_text())
        except (OSError, ValueError):
            return None
        return outcome if job["site"] == "local" or "action" in outcome else None


class RunDir:
    """Paths of a run. Creating the object touches nothing on disk."""

    def __init__(self, path: Path | str):
        self.path = Path(path).absolute()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def lock(self) -> Path:
        return self.path / "owner.lock"

    @property
    def owner(self) -> Path:
        return self.path / "owner.json"

    @property
    def input(self) -> Path:
        return self.path / "input"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self, number)

    def attempts(self) -> list[AttemptDir]:
        """All attempts with a folder, oldest first."""
        folder = self.path / "attempts"
        numbers = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []
        return [self.attempt(number) for number in numbers]

    @contextlib.contextmanager
    def own(self, **who) -> Iterator[None]:
        """Be the only writer of this run. The lock ends with the process, however it ends.

        Args:
            who: what the next one who asks should be told, such as attempt and job id.

        Raises:
            Fault: another live process owns the run.
        """
        lock = FileLock(self.lock, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise Fault(
                f"run {self.name} is being written by {self.writer()}; end it first: bin/stop {self.name}"
            ) from None
        try:
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": round(time.time()), **who}
            write_atomically(self.owner, json.dumps(owner) + "\n")
            yield
        finally:
            lock.release()

    def writer(self) -> str | None:
        """Who owns the run just now, in words; None when nobody does."""
        if not self.path.is_dir():
            return None
        lock = FileLock(self.lock, timeout=0)
        try:
            with lock:
                return None
        except Timeout:
            pass
        try:
            owner = json.loads(self.owner.read_text())
            return ", ".join(f"{key} {value}" for key, value in owner.items() if key != "since")
        except (OSError, ValueError):
            return "a process that has just started"

    def events(self) -> list[dict]:
        """The journal, oldest first. Raises Fault on a damaged line."""
        return list(read_json_lines(self.journal))

    def record(self, event: str, **fields) -> None:
        """Append one line to the journal and flush it to disk.

        Writers on several nodes may append: the line is written under a lock. A tail that a crash left without its
        newline becomes a `torn_line` event that keeps the text.
        """
        now = round(time.time(), 3)
        lines = [{"time": now, "event": event, **fields}]
        with self.journal.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            complete, newline, torn = file.read().rpartition(b"\n")
            if torn:
                lines.insert(0, {"time": now, "event": "torn_line", "text": torn.decode(errors="replace")})
                file.truncate(len(complete) + len(newline))
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


def check_name(name: str) -> str:
    """Return a run name that is safe as a folder name.

    Raises:
        UsageFault: the name is empty, too long, or has characters other than letters, digits, `.`, `_`, `-`.
    """
    if not RUN_NAME.fullmatch(name):
        raise UsageFault(
            f"run name {name!r} cannot be a folder name; use letters, digits, '.', '_' and '-', starting with a letter "
            "or digit, at most 100 of them"
        )
    return name
