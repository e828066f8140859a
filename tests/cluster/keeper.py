"""Keeps one test cluster: starts munge and Slurm, obeys a few words on standard input, and takes everything down.

    python keeper.py FOLDER NODES namespaces|loopback [accounting]

Prints one JSON line {"mode", "nodes", "login", "conf"} when all nodes are idle. Then reads words, one a line, and
answers each with a JSON line: `boot NAME`, `power_off NAME`. Ends at SIGTERM and at end of input (with /dev/null as
input: at SIGTERM only).
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "pylib")]

import machines  # noqa: E402
import slurm_conf  # noqa: E402

from atlasrl import processes  # noqa: E402

START_SECONDS = 60


class Cluster:
    """The daemons of one cluster, all of them children of this process."""

    def __init__(self, folder: Path, count: int, mode: str):
        self.folder, self.mode = folder, mode
        self.names = [f"node{number:02d}" for number in range(1, count + 1)]
        self.machines: dict[str, machines.Machine] = {}
        self.daemons: list[subprocess.Popen] = []
        for part in ("run", "log", "state", "spool", "munge", "shared"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "munge").chmod(0o700)
        self.conf = folder / "slurm.conf"

    # --- what runs where ---

    def on(self, name: str, *command: str) -> list[str]:
        """A command line that runs on a machine ("login" or a node's name)."""
        return self.machines[name].words(*command) if self.mode == "namespaces" else list(command)

    def daemon(self, name: str, *command: str) -> subprocess.Popen:
        """Start a daemon in the foreground on a machine."""
        log = self.folder / "log" / f"{Path(command[0]).name}.{name}.out"
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        process = processes.spawn(self.on(name, *command), env=env, log=log)
        self.daemons.append(process)
        return process

    # --- start ---

    def start(self) -> None:
        if self.mode == "namespaces":
            self._start_network()
            controller, words = "login", ["" for _ in self.names]
        else:
            port = _free_ports(len(self.names) + 1)
            host = socket.gethostname()
            controller = f"{host}(127.0.0.1)\nSlurmctldPort={port.pop()}"
            words = [f"NodeHostname={host} NodeAddr=127.0.1.{i} Port={port.pop()}" for i, _ in enumerate(self.names, 1)]
        user = pwd.getpwuid(os.geteuid()).pw_name
        slurm_conf.write(
            self.folder,
            self.names,
            controller=controller,
            addresses=words,
            lines=["AccountingStorageType=accounting_storage/none"],
            user=user,
        )
        self._start_munge()
        self.daemon("login", "slurmctld", "-D", "-c")
        for name in self.names:
            self.daemon(name, "slurmd", "-D", "-N", name)
        self.wait(lambda: self.sinfo("idle") == set(self.names), "all nodes to be idle")

    def _start_network(self) -> None:
        numbers = {"login": 254, **{name: number for number, name in enumerate(self.names, 1)}}
        lines = ["127.0.0.1 localhost", *(f"{machines.NETWORK}.{number} {name}" for name, number in numbers.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        for name, number in numbers.items():
            self.machines[name] = machines.boot(name, number, self.folder, self.machines.get("login"))

    def _start_munge(self) -> None:
        """One munged for all machines: its unix socket passes through the namespaces."""
        key = self.folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        paths = {
            "key-file": key,
            "socket": self.folder / "run" / "munge.socket",
            "pid-file": self.folder / "run" / "munged.pid",
            "log-file": self.folder / "log" / "munged.log",
            "seed-file": self.folder / "munge" / "seed",
        }
        options = [f"--{name}={path}" for name, path in paths.items()]
        self.daemon("login", "munged", "--force", "--foreground", "--num-threads=4", *options)
        self.wait(paths["socket"].is_socket, "munge")

    # --- questions ---

    def sinfo(self, state: str) -> set[str]:
        command = self.on("login", "sinfo", "--noheader", "--Node", "--format=%N", f"--states={state}")
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        return set(subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout.split())

    def wait(self, condition, what: str) -> None:
        limit = time.monotonic() + START_SECONDS
        while not condition():
            dead = [daemon for daemon in self.daemons if daemon.poll() is not None]
            if dead or time.monotonic() > limit:
                told = "\n".join(log.read_text()[-1500:] for log in sorted((self.folder / "log").iterdir()))
                raise RuntimeError(f"waited for {what}; {[' '.join(map(str, d.args)) for d in dead]} ended\n{told}")
            time.sleep(0.05)

    # --- life ---

    def boot(self, name: str) -> None:
        """Boot a machine that was powered off, and its slurmd."""
        number = int(self.machines[name].address.rpartition(".")[2])
        self.machines[name] = machines.boot(name, number, self.folder, self.machines["login"])
        self.daemon(name, "slurmd", "-D", "-N", name)

    def power_off(self, name: str) -> None:
        self.machines[name].power_off()

    def stop(self) -> None:
        with contextlib.suppress(Exception):
            env = {**os.environ, "SLURM_CONF": str(self.conf)}
            user = pwd.getpwuid(os.geteuid()).pw_name
            subprocess.run(self.on("login", "scancel", "--full", f"--user={user}"), env=env, timeout=10, check=False)
        for name in [*self.names, "login"]:
            if name in self.machines:
                self.machines[name].power_off()
        processes.end_descendants(patience=2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


def main(folder: str, count: str, mode: str) -> None:
    processes.adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    cluster = Cluster(Path(folder), int(count), mode)

    def say(**words) -> None:
        print(json.dumps(words), flush=True)

    try:
        cluster.start()
        firsts = {name: machine.first for name, machine in cluster.machines.items()}
        say(mode=mode, nodes=cluster.names, conf=str(cluster.conf), firsts=firsts)
        if Path("/proc/self/fd/0").readlink() == Path("/dev/null"):
            signal.pause()
        for line in sys.stdin:
            word, _, name = line.strip().partition(" ")
            {"boot": cluster.boot, "power_off": cluster.power_off}[word](name)
            say(done=line.strip(), first=cluster.machines[name].first)
    finally:
        cluster.stop()
        if not os.environ.get("ATLASRL_KEEP_CLUSTER"):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
