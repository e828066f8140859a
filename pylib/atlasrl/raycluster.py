"""Ray on the nodes of a job: start it, wait for it with a deadline, name who is missing, end only what is ours.

Rank 0 is the head. Each node runs `ray start --block` as its own child; there is no `ray stop`, which would end every
Ray process of the host (ray issues 12264, 6135).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from atlasrl import processes
from atlasrl.errors import Fault
from atlasrl.logs import last_line

if TYPE_CHECKING:
    from atlasrl.launch.ports import PortPlan

# verl reserves 3 CPUs in each placement bundle (max_colocate_count) and the driver and the cast tasks need some.
CPUS_PER_DEVICE, CPUS_BESIDE = 3, 4
STARTED = b"Ray runtime started"  # what `ray start` prints once its daemons are up
PATIENCE_SECONDS = 1  # what Ray's own shutdown allows a process; the GCS would sit out any number


@dataclass(frozen=True)
class RayNode:
    """What one node of the Ray cluster is started with."""

    rank: int
    name: str
    address: str
    ports: PortPlan
    temp: Path
    devices: int
    object_store_mb: int | None

    @property
    def gcs_address(self) -> str:
        """Where this node's GCS listens, should it be the head."""
        return f"{self.address}:{self.ports.gcs}"


def start_command(python: str, node: RayNode, head: str) -> list[str]:
    """The words of `ray start` for a node; `head` is the GCS address of rank 0."""
    is_head = node.rank == 0
    # no monitor: it would scale the cluster, and costs 80 MB and seconds of imports
    role = ["--head", "--include-dashboard=false", "--no-monitor"] if is_head else [f"--address={head}"]
    return [
        *(python, "-m", "atlasrl.raystart", *role),
        f"--node-ip-address={node.address}",
        f"--node-name={node.name}",
        *node.ports.ray_options(head=is_head),
        f"--temp-dir={node.temp}",
        # Workers are placed by device; CPUs only count so that verl's placement groups fit.
        f"--num-cpus={CPUS_PER_DEVICE * node.devices + CPUS_BESIDE}",
        f"--resources={json.dumps({'NPU': node.devices})}",
        *([f"--object-store-memory={node.object_store_mb * 2**20}"] if node.object_store_mb else []),
        *("--disable-usage-stats", "--block"),
    ]


class Daemon:
    """This node's `ray start --block`. Ray gives a node 30 s to start, also where 60 s would do: it is tried again."""

    TRIES = 3

    def __init__(self, node: RayNode, command: list[str], env: dict[str, str], log: Path):
        self._node, self._command, self._env, self._log = node, command, env, log
        self._tries, self._began = 0, 0
        self._start()

    def _start(self) -> None:
        self._tries += 1
        self._began = self._log.stat().st_size if self._log.exists() else 0
        self._process = processes.spawn(self._command, env=self._env, log=self._log)

    def check(self) -> None:
        """Start Ray again when it failed to come up.

        Raises:
            Fault: it failed for the last time, or it ended after it was up.
        """
        if (code := self._process.poll()) is None:
            return
        was_up = STARTED in self._log.read_bytes()[self._began :]
        if was_up or self._tries == self.TRIES:
            raise Fault(f"{self._node.name}: Ray ended with exit code {code}: {last_line(self._log, self._began)}")
        processes.end(processes.leftovers(self._node.temp), PATIENCE_SECONDS)
        self._start()

    def close(self) -> None:
        """End Ray's processes before the `ray start` that minds them, which waits seconds for one after the other."""
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.end(psutil.Process(self._process.pid).children(recursive=True), PATIENCE_SECONDS)
        processes.end_tree(self._process, patience=0)


class Watch:
    """The cluster as a probe process sees it; never blocks the caller.

    `alive` maps node names to their resources; it is None until the GCS answered for the first time.
    """

    def __init__(self, address: str, env: dict[str, str], log: Path):
        self._address, self._env, self._log = address, env, log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.alive: dict[str, dict[str, float]] | None = None
        self._start()

    def _start(self) -> None:
        words = [sys.executable, "-m", "atlasrl.rayprobe", self._address]
        self._process = processes.spawn(words, env=self._env, log=self._log, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            if line.startswith('{"alive"'):  # Ray prints news of dead nodes to the same stream
                self._lines.put(line)

    def look(self) -> None:
        """Take in what the probe has said since the last look.

        A probe that gave up before it saw a node is started again: it waits a minute for the GCS, then seconds for the
        head's raylet, which may need another try.
        """
        while not self._lines.empty():
            self.alive = json.loads(self._lines.get())["alive"]
        if self.alive is None and self.failed:
            self._start()

    @property
    def failed(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        processes.end_tree(self._process, patience=0)


def wait_for_nodes(
    watch: Watch, nodes: int, devices: int, deadline: float, interrupted: Callable[[], None], last_words: Callable
) -> None:
    """Wait until all nodes and all their devices are there.

    Args:
        deadline: seconds from now.
        interrupted: called in each round; raises to give up early (a node failed, a signal came).
        last_words: node name -> the last line of its log, for the message.

    Raises:
        Fault: on time-out, naming the missing nodes with their last log lines; or too few devices on a node.
    """
    wanted = [f"node{rank}" for rank in range(nodes)]
    limit = time.monotonic() + deadline
    while True:
        watch.look()
        alive = watch.alive or {}
        missing = [name for name in wanted if name not in alive]
        if not missing:
            break
        interrupted()
        if time.monotonic() > limit:
            words = "; ".join(f"{name} ({last_words(name)})" for name in missing)
            raise Fault(
                f"{len(wanted) - len(missing)}/{len(wanted)} nodes joined Ray within {deadline:.0f} s; missing: {words}"
            )
        time.sleep(0.1)
    for name in wanted:
        if (found := int(alive[name].get("NPU", 0))) != devices:
            raise Fault(f"{name} offers {found} devices to Ray, {devices} are planned; look at its device driver")


def make_temp(temp: Path) -> None:
    """Make this node's Ray folder, readable by nobody else; what a killed attempt left there is removed first.

    Raises:
        Fault: the folder belongs to somebody else, or a process of an earlier attempt still uses it.
    """
    if temp.exists():
        if not _is_ours(temp):
            raise Fault(f"{temp} belongs to another user; set another `scratch` in the site file")
        for process in processes.leftovers(temp):
            raise Fault(f"pid {process.pid} of an earlier attempt still uses {temp}; end it, then try again")
        remove_temp(temp)
    temp.mkdir(parents=True, mode=0o700)


def sweep(folders: Iterable[Path]) -> None:
    """Remove what killed attempts of a run left on this node; a folder that is in use, or somebody else's, stays."""
    for folder in folders:
        if folder.is_dir() and _is_ours(folder) and not processes.leftovers(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def remove_temp(temp: Path) -> None:
    """Remove this node's Ray folder, and the attempt's when it was the last one in it."""
    shutil.rmtree(temp, ignore_errors=True)
    with contextlib.suppress(OSError):
        temp.parent.rmdir()
