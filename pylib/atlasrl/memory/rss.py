"""Resident memory of processes: read from /proc, per phase, without touching the processes themselves.

`python -m atlasrl.memory.rss FILE --pid PID` samples a process and all its descendants until PID ends and appends one
JSON line per process whose memory or name moved: {"time", "pid", "name", "rss", "peak"}; bytes. "peak" is the kernel's
own high water mark, so nothing between two samples is missed. A worker of Ray is named after what it does just now,
such as `ray::WorkerDict.actor_rollout_update_actor`: the phase.
"""

from __future__ import annotations

import json
import os
import re
import select
import time
from pathlib import Path

PROC = Path("/proc")
STEP = 2**20  # bytes; smaller moves are not written


def status(pid: int | str = "self") -> dict[str, int | str] | None:
    """{"name", "parent", "rss", "peak"} of a process; None when it is gone."""
    try:
        text = (PROC / str(pid) / "status").read_text()
    except OSError:
        return None
    fields = dict(re.findall(r"^(Name|PPid|VmRSS|VmHWM):\s+(.+?)(?: kB)?$", text, re.M))
    if "VmRSS" not in fields:  # a kernel thread or a zombie
        return None
    return {
        "name": _title(pid) if fields["Name"].startswith("ray::") else fields["Name"],
        "parent": int(fields["PPid"]),
        "rss": int(fields["VmRSS"]) * 1024,
        "peak": int(fields["VmHWM"]) * 1024,
    }


def _title(pid: int | str) -> str:
    """What a Ray worker calls itself; the kernel keeps 15 letters of it, the command line all."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        words = ""
    return words.partition("\0")[0].strip() or "ray::"


def reset_peak() -> None:
    """Start a new high water mark of this process (Linux 4.0 and later)."""
    (PROC / "self" / "clear_refs").write_text("5")


def tree(root: int) -> dict[int, dict]:
    """The status of a process and of all its descendants."""
    known = {int(p.name): found for p in PROC.iterdir() if p.name.isdigit() and (found := status(p.name))}
    family, grown = {root}, True
    while grown:
        more = {pid for pid, found in known.items() if found["parent"] in family} - family
        grown = bool(more)
        family |= more
    return {pid: known[pid] for pid in family if pid in known}


def sample(root: int, file: Path, interval: float = 0.5) -> None:
    """Append samples to `file` until `root` ends."""
    written: dict[int, tuple[int, int, str]] = {}
    handle = os.pidfd_open(root)
    try:
        with file.open("a", buffering=1) as out:
            ended = False
            while not ended:
                now = round(time.time(), 3)
                for pid, found in tree(root).items():
                    rss, peak, name = written.get(pid, (-STEP, -STEP, ""))
                    if abs(found["rss"] - rss) >= STEP or found["peak"] - peak >= STEP or found["name"] != name:
                        written[pid] = (found["rss"], found["peak"], found["name"])
                        line = {
                            "time": now,
                            "pid": pid,
                            "name": found["name"],
                            "rss": found["rss"],
                            "peak": found["peak"],
                        }
                        out.write(json.dumps(line) + "\n")
                ended = bool(select.select([handle], [], [], interval)[0])
    finally:
        os.close(handle)


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m atlasrl.memory.rss", description="Sample resident memory.")
    parser.add_argument("file", type=Path, help="JSON lines are appended here")
    parser.add_argument("--pid", type=int, required=True, help="this process and all its descendants")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between samples")
    options = parser.parse_args()
    sample(options.pid, options.file, options.interval)


if __name__ == "__main__":
    main()
