"""Emulated machines: Linux namespaces with their own network, host name, /tmp, /dev/shm and process table.

A machine is one `unshare` child of the keeper. Its namespaces have no names on disk, so when its first process dies
(SIGKILL to it is a power failure) nothing of it is left: no process, no interface, no mount.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.0"
ROOT = Path(__file__).resolve().parents[2]

# The machine's first process. It waits for its network, mounts what is its own, and then only reaps.
BOOT = r"""
set -eu
name=$1 own=$2 hosts=$3; shift 3
read -r _go
hostname "$name"
mount --bind "$hosts" /etc/hosts
mount -t tmpfs -o size=768m tmpfs /dev/shm
mount -t tmpfs tmpfs /run; mkdir /run/sshd
mkdir -p "$own/tmp"; chmod 1777 "$own/tmp"
for kept in "$@"; do mkdir -p "$own/tmp/${kept#/tmp/}"; mount --rbind "$kept" "$own/tmp/${kept#/tmp/}"; done
mount --rbind "$own/tmp" /tmp
echo up
exec "$PYTHON" -S -c "
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
os.chdir('/')
while True:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    signal.sigwait([signal.SIGCHLD])
" >/dev/null
"""


def possible() -> bool:
    """Whether this user may make namespaces and interfaces here."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        return False
    trial = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc"]
    script = (
        "ip link add left type veth peer name right && ip link add br0 type bridge && mount -t tmpfs tmpfs /dev/shm"
    )
    return subprocess.run([*trial, "bash", "-c", script], capture_output=True, check=False).returncode == 0


@dataclass
class Machine:
    """A running machine. `first` is the host's pid of its first process."""

    name: str
    address: str
    first: int
    unshare: subprocess.Popen

    def words(self, *command: str) -> list[str]:
        """A command line that runs `command` on the machine."""
        return words(self.first, *command)

    def power_off(self) -> None:
        """Kill the first process, and with it every other one, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first, 9)
        self.unshare.wait(timeout=30)


def words(first: int, *command: str) -> list[str]:
    """A command line that runs `command` on the machine whose first process is `first`, in the current folder."""
    return [
        "nsenter",
        f"--target={first}",
        "--net",
        "--uts",
        "--mount",
        "--ipc",
        "--pid",
        f"--wd={Path.cwd()}",
        *command,
    ]


def boot(name: str, number: int, folder: Path, hub: Machine | None) -> Machine:
    """Start a machine with address 10.77.0.<number>.

    Args:
        folder: of the whole cluster; holds `hosts` and each machine's own disk.
        hub: the machine whose bridge connects all; None makes this machine the hub.
    """
    own = folder / "machines" / name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    kept = sorted({str(p) for p in (ROOT, folder, Path(sys.prefix)) if p.is_relative_to("/tmp")})
    isolate = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare = subprocess.Popen(
        [*isolate, "bash", "-c", BOOT, name, name, str(own), str(folder / "hosts"), *kept],
        env={**os.environ, "PYTHON": sys.executable},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "log" / f"{name}.boot").open("w"),
        text=True,
    )
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    while not (first := children.read_text().split()):
        if unshare.poll() is not None:
            raise RuntimeError(f"{name} did not boot: {(folder / 'log' / f'{name}.boot').read_text()}")
    machine = Machine(name, f"{NETWORK}.{number}", int(first[0]), unshare)
    _wait_for_namespace(machine.first)
    _connect(machine, hub)
    print("go", file=unshare.stdin, flush=True)
    if unshare.stdout.readline() != "up\n":
        raise RuntimeError(f"{name} did not boot: {(folder / 'log' / f'{name}.boot').read_text()}")
    return machine


def _wait_for_namespace(pid: int) -> None:
    """The child exists before it has left our network namespace only for an instant; never act in that instant."""
    ours = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{pid}/ns/net").readlink() == ours:
        pass


def _connect(machine: Machine, hub: Machine | None) -> None:
    def run(first: int, line: str) -> None:
        subprocess.run(["nsenter", f"--target={first}", "--net", *shlex.split(line)], check=True)

    run(machine.first, "ip link set lo up")
    if hub is None:
        run(machine.first, "ip link add eth0 type bridge")
    else:
        run(hub.first, f"ip link add {machine.name} type veth peer name eth0 netns {machine.first}")
        run(hub.first, f"ip link set {machine.name} master eth0 up")
    run(machine.first, f"ip addr add {machine.address}/24 dev eth0")
    run(machine.first, "ip link set eth0 up")
