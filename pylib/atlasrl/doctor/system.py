"""The machine below the stack: limits, memory, disks, shared folders, clock, network interface."""

from __future__ import annotations

import os
import platform
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from atlasrl.doctor.expected import Expected
from atlasrl.doctor.finding import Fact, Finding, error, ok, warn
from atlasrl.doctor.host import Host

GIB = 2**30
SHM_BYTES = {
    "npu": 32 * GIB,
    "cuda": 32 * GIB,
    "cpu": 100 * 2**20,
}  # Ray's object store; a container's default is 64 MB
OPEN_FILES = {"npu": 32768, "cuda": 32768, "cpu": 4096}  # verl's Ascend recipe raises the limit to 32768
TASKS = {"npu": 16384, "cuda": 16384, "cpu": 2048}  # threads of Ray, HCCL and vLLM together
HUGE_SHARE = 0.1
SKEW_WARN, SKEW_ERROR = 2.0, 60.0  # seconds against the file server


def check_limits(host: Host, expected: Expected) -> Iterator[Finding]:
    """Open files and tasks."""
    soft, hard = host.limit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES[expected.device]
    if 0 <= soft < wanted:
        remedy = f"ulimit -n {wanted} in the site's setup" + ("" if hard < 0 or hard >= wanted else ", as root")
        yield error("open files", f"limit {soft}, at least {wanted} needed (hard limit {hard})", remedy)
    tasks = [("ulimit -u", host.limit(resource.RLIMIT_NPROC)[0])]
    cgroup = (host.read("/sys/fs/cgroup/pids.max") or "").strip()
    if cgroup.isdigit():
        tasks.append(("pids.max of the container", int(cgroup)))
    for name, count in tasks:
        if 0 <= count < TASKS[expected.device]:
            remedy = "raise it; Ray's workers die with 'cannot create thread'"
            yield error("tasks", f"{name} is {count}, at least {TASKS[expected.device]} needed", remedy)


def check_shared_memory(host: Host, expected: Expected) -> Iterator[Finding]:
    """/dev/shm, where Ray keeps its objects; when it is small, Ray falls back to slow files."""
    usage, wanted = host.usage(host.path("/dev/shm")), SHM_BYTES[expected.device]
    if usage.free < wanted:
        what = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free, {wanted / GIB:.2f} needed"
        remedy = "--shm-size of the container" if usage.total < wanted else "leftovers of dead jobs fill it"
        yield error("/dev/shm", what, remedy)


def check_memory(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """Host memory, and the part of it that huge pages keep from everybody."""
    sizes = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+)", host.read("/proc/meminfo") or "", re.M)}
    total = sizes.get("MemTotal", 0)
    yield Fact("host memory in GiB", round(total * 1024 / GIB), tolerance=max(1.0, 0.02 * total * 1024 / GIB))
    huge = sizes.get("HugePages_Total", 0) * sizes.get("Hugepagesize", 0)
    if huge > HUGE_SHARE * total:
        what = (
            f"{huge * 1024 / GIB:.0f} of {total * 1024 / GIB:.0f} GiB are reserved as huge pages that torch cannot use"
        )
        yield warn("huge pages", what, "sysctl vm.nr_hugepages=0, as root")
    setting = re.search(r"\[(\w+)\]", host.read("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    if setting:
        yield Fact("transparent huge pages", setting[1])


def check_processor(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """Architecture, cores, and the governor that slows a host-bound rollout."""
    yield Fact("architecture", platform.machine())
    yield Fact("kernel", platform.release())
    yield Fact("cores", os.cpu_count() or 0)
    governor = (host.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "").strip()
    if governor == "powersave":
        yield warn("cpu", "governor powersave: kernel launches are slow", "cpupower frequency-set -g performance")


def check_folders(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """The site's folders: there, writable, with room, and the same file system on every node."""
    mounts = _mounts(host)
    for folder in (*expected.paths, expected.scratch):
        here = host.path(folder)
        if not here.is_dir():
            yield error("folders", f"{folder} is not there", "mount it on this node, or correct the site file")
            continue
        if folder != expected.scratch:
            yield Fact(f"file system of {folder}", _mount_of(folder, mounts))
        usage = host.usage(here)
        if usage.free < expected.free_bytes:
            what = f"{folder} has {usage.free / 1e9:.1f} GB free, {expected.free_bytes / 1e9:.0f} needed"
            yield error("disk", what, "free some, or name another folder in the site file")
        yield from _check_clock(host, folder, here, is_shared=folder != expected.scratch)


def _check_clock(host: Host, folder: Path, here: Path, *, is_shared: bool) -> Iterator[Finding]:
    """Write a file: it works, and on a shared folder its time is the server's, the same for all nodes."""
    try:
        with tempfile.NamedTemporaryFile(dir=here, prefix=".atlasrl-doctor-") as file:
            file.write(b"?")
            file.flush()
            skew = host.clock() - Path(file.name).stat().st_mtime
    except OSError as problem:
        yield error("folders", f"{folder} cannot be written: {problem.strerror}", "owner, quota or a read-only mount")
        return
    if is_shared and abs(skew) > SKEW_WARN:
        what = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the server of {folder}"
        say = error if abs(skew) > SKEW_ERROR else warn
        yield say("clock", what, "start chronyd or ntpd; time-outs and logs of the nodes do not fit together")


def check_interface(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """The site's network interface: there, up, with an IPv4 route."""
    nic = expected.nic
    if nic is None:
        return
    folder = Path("/sys/class/net")
    state = host.read(folder / nic / "operstate")
    if state is None:
        names = sorted(entry.name for entry in host.path(folder).iterdir()) if host.path(folder).is_dir() else []
        yield error("interface", f"no {nic}; this node has {', '.join(names) or 'none'}", "set nic in the site file")
        return
    yield Fact(f"MTU of {nic}", (host.read(folder / nic / "mtu") or "unknown").strip())
    if state.strip() not in ("up", "unknown"):  # a bridge or loopback says unknown
        yield error("interface", f"{nic} is {state.strip()}", "cable or switch; `ip link show`")
    elif not re.search(rf"^{re.escape(nic)}\s", host.read("/proc/net/route") or "", re.M) and nic != "lo":
        yield error("interface", f"{nic} has no IPv4 route, and HCCL and Ray need IPv4", "give it an address")
    else:
        yield ok("interface", f"{nic} is up")


def _mounts(host: Host) -> list[tuple[str, str]]:
    """(mount point, "type source") of /proc/mounts."""
    rows = [line.split() for line in (host.read("/proc/mounts") or "").splitlines()]
    return [(row[1], f"{row[2]} {row[0]}") for row in rows if len(row) >= 3]


def _mount_of(folder: Path, mounts: list[tuple[str, str]]) -> str:
    """The file system that holds a folder: the longest mount point above it, and the later of equal ones."""
    above = [(len(point), number) for number, (point, _) in enumerate(mounts) if folder.is_relative_to(point)]
    return mounts[max(above)[1]][1] if above else "unknown"
