"""One port plan per node of a job: every port of Ray and HCCL, each with its reason.

Ray's default and random ports clash as soon as two jobs share a node (ray#10154, ray#22663, ray#59551), and a number
derived from the job id modulo something clashes again (srt-slurm#195). So a plan is a *block* of neighbouring ports
below the ephemeral range, its place is derived from the job, and it moves on when any port of it is held by someone.

The first port of the block is held open by the supervisor for the whole job: two jobs that probe at the same moment
cannot both think the block is free.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from atlasrl.errors import Fault

COMPONENTS = {
    "claim": "held open by the supervisor, so that no second job takes the block",
    "gcs": "ray start --port: the head's control service",
    "dashboard": "ray start --dashboard-port (head; default 8265)",
    "node_manager": "ray start --node-manager-port",
    "object_manager": "ray start --object-manager-port",
    "dashboard_agent_grpc": "ray start --dashboard-agent-grpc-port",
    "dashboard_agent_listen": "ray start --dashboard-agent-listen-port (default 52365 is in the ephemeral range)",
    "runtime_env_agent": "ray start --runtime-env-agent-port",
    "metrics_export": "ray start --metrics-export-port",
    "autoscaler_metric": "AUTOSCALER_METRIC_PORT of Ray's monitor (default 44217 is in the ephemeral range)",
    "dashboard_metric": "DASHBOARD_METRIC_PORT of Ray's dashboard (default 44227 is in the ephemeral range)",
    "master": "rendezvous of the trainer's process group (MASTER_PORT)",
}
HCCL_BASE = 16  # HCCL_IF_BASE_PORT: HCCL takes base .. base + 15
HCCL_SOCKETS = 112  # HCCL_HOST_SOCKET_PORT_RANGE: at least one per process; 8 NPUs, trainer and rollout, several groups
WORKERS = 368  # one port per Ray worker process
BLOCK = 16 + HCCL_BASE + HCCL_SOCKETS + WORKERS  # 512
LOWEST = 10000  # below are well-known services: Slurm 6817-6819, Ray's own defaults, databases

TCP_LISTEN = "0A"  # as /proc/net/tcp writes it; the kernel's tcp_states.h
IP_LOCAL_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class PortPlan:
    """The ports of one node. `first` is the first port of its block; all others follow from it."""

    first: int
    reason: str

    def __getattr__(self, name: str) -> int:
        try:
            return self.first + list(COMPONENTS).index(name)
        except ValueError:
            raise AttributeError(name) from None

    @property
    def hccl_base(self) -> int:
        return self.first + 16

    @property
    def hccl_sockets(self) -> tuple[int, int]:
        """First and last port of the host side range."""
        return self.hccl_base + HCCL_BASE, self.hccl_base + HCCL_BASE + HCCL_SOCKETS - 1

    @property
    def workers(self) -> tuple[int, int]:
        """First and last port of Ray's worker processes."""
        return self.hccl_sockets[1] + 1, self.first + BLOCK - 1

    def ray_options(self, head: bool) -> list[str]:
        """Options of `ray start`."""
        names = ["node_manager", "object_manager", "dashboard_agent_grpc", "dashboard_agent_listen"]
        names += ["runtime_env_agent", "metrics_export"]
        if head:
            names.append("dashboard")
        options = [f"--{name.replace('_', '-')}-port={getattr(self, name)}" for name in names]
        options += [f"--min-worker-port={self.workers[0]}", f"--max-worker-port={self.workers[1]}"]
        return [f"--port={self.gcs}", *options] if head else options

    def environment(self) -> dict[str, str]:
        """Variables for Ray's daemons and for every process of the job."""
        return {
            "AUTOSCALER_METRIC_PORT": str(self.autoscaler_metric),
            "DASHBOARD_METRIC_PORT": str(self.dashboard_metric),
            "HCCL_IF_BASE_PORT": str(self.hccl_base),
            "HCCL_HOST_SOCKET_PORT_RANGE": "{}-{}".format(*self.hccl_sockets),
        }

    def as_dict(self) -> dict:
        """All ports for the run's records."""
        table = {name: getattr(self, name) for name in COMPONENTS}
        ranges = {"hccl_base": self.hccl_base, "hccl_sockets": list(self.hccl_sockets), "workers": list(self.workers)}
        return {**table, **ranges, "reason": self.reason}


def plan(
    seed: str,
    slot: int = 0,
    slots: int = 1,
    taken: Callable[[int], str | None] = lambda port: None,
    ephemeral: tuple[int, int] | None = None,
) -> PortPlan:
    """Choose the block of one node.

    Args:
        seed: names the job, for example "1234/2" for job 1234, attempt 2. Equal on all nodes, so that all nodes of a
            real cluster plan equal ports.
        slot, slots: this node's number among the nodes that share this host, and how many they are.
        taken: who holds a port, None when it is free.
        ephemeral: first and last port of the ephemeral range; default: this host's.

    Raises:
        Fault: no room outside the ephemeral range, or every block has a port that is held.
    """
    low, high = _room(ephemeral or ephemeral_range(), slots)
    blocks = (high - low + 1) // BLOCK // slots * slots  # whole rounds: the slots of a host never meet
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % (blocks // slots)
    moved: list[str] = []
    for offset in range(blocks // slots):
        first = low + ((start + offset) % (blocks // slots) * slots + slot) * BLOCK
        holder = next(((port, who) for port in range(first, first + BLOCK) if (who := taken(port))), None)
        if holder is None:
            return PortPlan(first, "; ".join([f"derived from job {seed}", *moved]))
        moved.append(f"moved from {first}: {holder[0]} is held by {holder[1]}")
    raise Fault(
        f"no block of {BLOCK} free ports between {low} and {high} on {socket.gethostname()}; {moved[0]}; "
        "end stale processes, or widen the room by raising net.ipv4.ip_local_port_range"
    )


def agreed(first: str | None) -> PortPlan | None:
    """The plan that all nodes of a job agreed on before they started; None when they did not."""
    return PortPlan(int(first), "agreed on by all nodes of the job") if first else None


@contextlib.contextmanager
def take(seed: str, slot: int = 0, slots: int = 1, wanted: PortPlan | None = None) -> Iterator[PortPlan]:
    """Choose a block, prove each of its ports free by binding it, and hold the claim until the context ends.

    `wanted` insists on a block that was agreed on with other nodes.

    Raises:
        Fault: as `plan`, or a port of the wanted block is held; the message says by whom.
    """
    claim: list[socket.socket] = []

    def holder(port: int) -> str | None:
        try:
            probe = _bound(port)
        except OSError:
            _close(claim)
            return owner(port)
        if claim:
            probe.close()
        else:
            claim.append(probe)  # the first port of a block is probed first: it stays bound
        return None

    try:
        if wanted is None:
            chosen = plan(seed, slot, slots, holder)
        else:
            chosen = wanted
            for port in range(wanted.first, wanted.first + BLOCK):
                if who := holder(port):
                    raise Fault(f"port {port} of {socket.gethostname()} is held by {who}; the job's plan needs it")
        claim[0].listen(1)
        yield chosen
    finally:
        _close(claim)


def _bound(port: int) -> socket.socket:
    """A socket bound to the port on all addresses; a listener on any address makes it fail, TIME_WAIT does not."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("", port))
    except OSError:
        probe.close()
        raise
    return probe


def _close(sockets: list[socket.socket]) -> None:
    while sockets:
        sockets.pop().close()


def ephemeral_range() -> tuple[int, int]:
    """First and last port that this host gives to outgoing connections."""
    low, high = IP_LOCAL_PORT_RANGE.read_text().split()
    return int(low), int(high)


def _room(ephemeral: tuple[int, int], slots: int) -> tuple[int, int]:
    """First and last usable port: below the ephemeral range, else above it."""
    need = BLOCK * slots
    for low, high in ((LOWEST, ephemeral[0] - 1), (1024, ephemeral[0] - 1), (ephemeral[1] + 1, 65535)):
        if high - low + 1 >= need:
            return low, high
    raise Fault(
        f"the ephemeral range {ephemeral[0]}-{ephemeral[1]} of {socket.gethostname()} leaves no {need} ports for "
        "Ray and HCCL, which lose them to outgoing connections; run: sysctl net.ipv4.ip_local_port_range='32768 60999'"
    )


def owner(port: int) -> str:
    """Who listens on a TCP port of this host: "pid 4711 (python, user root)", as far as it can be seen."""
    return held_ports([port]).get(port, "a process that bound it without listening")


def held_ports(within: Container[int] = range(1, 65536)) -> dict[int, str]:
    """The ports of this host that somebody listens on, and who."""
    listeners: dict[int, tuple[str, int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for row in map(str.split, Path(table).read_text().splitlines()[1:]):
                port = int(row[1].rpartition(":")[2], 16)
                if row[3] == TCP_LISTEN and port in within:
                    listeners[port] = row[9], int(row[7])
    processes = _processes({f"socket:[{inode}]" for inode, _ in listeners.values()})
    return {
        port: processes.get(f"socket:[{inode}]", f"a process of user {_user(uid)} (not visible to us)")
        for port, (inode, uid) in sorted(listeners.items())
    }


def _processes(sockets: set[str]) -> dict[str, str]:
    """Which process has each socket open, in words."""
    found = {}
    for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
        with contextlib.suppress(OSError):
            if (target := str(link.readlink())) in sockets:
                process = link.parents[1]
                name = (process / "comm").read_text().strip()
                found[target] = f"pid {process.name} ({name}, user {_user(process.stat().st_uid)})"
    return found


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
