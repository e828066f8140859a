"""A real Slurm cluster on this machine: start it, use it, switch its nodes off, leave nothing behind.

with running(nodes=4) as cluster:
    cluster.login("sbatch", "job.sh")
    cluster.power_off("node02")
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import machines

HERE = Path(__file__).parent

SITE = """\
description: test cluster of {nodes} nodes ({mode})
kind: slurm
{nic}
runs: {shared}/runs
scratch: /tmp
ray:
  deadline: 180
  deadline_per_node: 30
  join_window: 3
  object_store_mb: 80
life:
  save_minutes: 0.5
slurm:
  partition: main
  time: 30
  exclusive: false
  cpus_per_node: 8
"""


@dataclass
class Cluster:
    """What a person at the login machine, or with a hand on a node's power switch, can do."""

    folder: Path
    facts: dict
    keeper: subprocess.Popen | None = None

    @property
    def shared(self) -> Path:
        """Seen by every node under the same path, and not by name node-local."""
        return self.folder / "shared"

    @property
    def runs(self) -> Path:
        return self.shared / "runs"

    @property
    def site(self) -> Path:
        return self.folder / "site.yaml"

    @property
    def nodes(self) -> list[str]:
        return self.facts["nodes"]

    def words(self, machine: str, *command: str) -> list[str]:
        """A command line that runs on "login" or on a node. In loopback mode all machines are this one."""
        firsts = self.facts["firsts"]
        return machines.words(firsts[machine], *command) if firsts else list(command)

    def on(self, machine: str, *command: str, check: bool = True, timeout: float = 120, **env: str):
        """Run a command to its end; output as text."""
        result = subprocess.run(
            self.words(machine, *map(str, command)),
            env={**os.environ, "SLURM_CONF": self.facts["conf"], "ATLASRL_RUNS": str(self.runs), **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and result.returncode:
            raise AssertionError(
                f"{command} on {machine} ended with {result.returncode}: {result.stderr}{result.stdout}"
            )
        return result

    def login(self, *command: str, **options):
        return self.on("login", *command, **options)

    def power_off(self, node: str) -> None:
        """Every process of the node dies at once; its network goes away."""
        self._ask(f"power_off {node}")

    def boot(self, node: str) -> None:
        self.facts["firsts"][node] = self._ask(f"boot {node}")["first"]

    def _ask(self, words: str) -> dict:
        print(words, file=self.keeper.stdin, flush=True)
        return json.loads(self.keeper.stdout.readline())

    @contextlib.contextmanager
    def small_disk(self, megabytes: int) -> Iterator[Path]:
        """A small filesystem that all machines share: one loop device, mounted on each of them and here."""
        image, point = self.folder / "disk", self.folder / "small"
        image.write_bytes(b"")
        os.truncate(image, megabytes * 2**20)
        point.mkdir()
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
        loop = subprocess.run(["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True)
        device = loop.stdout.strip()
        places = [self.words(name) for name in ("login", *self.nodes)] if self.facts["firsts"] else []
        try:
            for place in ([], *places):
                subprocess.run([*place, "mount", device, str(point)], check=True)
            yield point
        finally:
            for place in ([], *places):
                subprocess.run([*place, "umount", "--lazy", str(point)], check=False)
            subprocess.run(["losetup", "--detach", device], check=True)
            image.unlink()

    def job_state(self, job: str) -> str:
        """PENDING, RUNNING, …; kept for 10 minutes after the end."""
        return self.login("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}").stdout.strip()

    def end_jobs(self) -> None:
        """End what is left: Slurm's jobs, and tasks over ssh on nodes that are machines of their own."""
        self.login("scancel", "--full", *self.login("squeue", "--noheader", "--format=%A").stdout.split(), check=False)
        for node in self.nodes if self.facts["firsts"] else ():
            self.on(node, "pkill", "-f", "atlasrl.launch.ssh_executor", check=False)
        idle = ("squeue", "--noheader", "--states=all", "--format=%T")
        over = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"}
        self.wait_for(lambda: set(self.login(*idle).stdout.split()) <= over, 120, "the end of all jobs")

    def release(self, job: str) -> None:
        """Let a requeued job start now; Slurm holds it back for two minutes."""
        self.login("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> object:
        limit = time.monotonic() + seconds
        while not (attained := condition()):
            assert time.monotonic() < limit, f"waited {seconds} s for {what}"
            time.sleep(0.2)
        return attained


def home() -> Path:
    """Where clusters live: not in /tmp, which each emulated node has for itself."""
    return Path("/var/lib") if os.geteuid() == 0 else Path.home() / ".cache"


def start(nodes: int, folder: Path, mode: str | None = None, keep_running: bool = False) -> Cluster:
    """Start a cluster and wait until all nodes are idle."""
    mode = mode or ("namespaces" if machines.possible() else "loopback")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    keeper = subprocess.Popen(
        [sys.executable, str(HERE / "keeper.py"), str(folder), str(nodes), mode],
        stdin=subprocess.DEVNULL if keep_running else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "keeper.log").open("w"),
        start_new_session=True,
        text=True,
    )
    answer = keeper.stdout.readline()
    if not answer:
        keeper.wait(timeout=60)
        log = folder / "keeper.log"
        raise RuntimeError(f"the cluster did not start: {log.read_text() if log.exists() else 'see above'}")
    cluster = Cluster(folder, json.loads(answer), keeper)
    nic = "nic: eth0" if mode == "namespaces" else "one_host: true"
    cluster.site.write_text(SITE.format(nodes=nodes, mode=mode, nic=nic, shared=cluster.shared))
    return cluster


@contextlib.contextmanager
def running(nodes: int, mode: str | None = None) -> Iterator[Cluster]:
    """A cluster for the time of a test."""
    home().mkdir(parents=True, exist_ok=True)
    cluster = start(nodes, Path(tempfile.mkdtemp(prefix="atlasrl-cluster-", dir=home())), mode)
    try:
        yield cluster
    finally:
        cluster.keeper.stdin.close()
        cluster.keeper.wait(timeout=60)
