"""Read PyTorch's memory snapshots, also torch_npu's: what verl's profiler tool `torch_memory` dumps.

They are pickles of plain dictionaries, lists, strings and numbers. The reader accepts nothing else, so a foreign file
cannot run code. No torch here.
"""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlasrl.errors import Fault


@dataclass(frozen=True)
class Snapshot:
    """One device at the moment of the dump, and the highest point of the recorded history."""

    path: Path
    reserved: int  # bytes of all segments
    allocated: int  # bytes of live blocks
    peak: int  # highest allocated bytes of the history, from its first event on; `allocated` without one
    holders: Counter  # Python frame -> bytes at the peak

    @property
    def idle(self) -> int:
        """Reserved and not in use: what fragmentation and caching keep."""
        return self.reserved - self.allocated


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a memory snapshot holds plain data only")

    def persistent_load(self, pid: Any):
        raise pickle.UnpicklingError("it refers to outside objects; a memory snapshot holds plain data only")


def read(path: Path, device: int = 0) -> Snapshot:
    """Read one device of a snapshot.

    Raises:
        Fault: not a pickle of plain data, or not the structure of a snapshot.
    """
    try:
        with path.open("rb") as file:
            tree = _PlainUnpickler(file).load()
        segments = [s for s in tree["segments"] if s.get("device", 0) == device]
        traces = tree.get("device_traces") or []
        trace = traces[device] if device < len(traces) else []
        live = {}
        for segment in segments:
            address = segment.get("address", 0)
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    live[block.get("address", address)] = (int(block["size"]), _frame(block.get("frames")))
                address += block["size"]
        reserved = sum(int(segment["total_size"]) for segment in segments)
        peak, holders = _replay(trace, live)
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
    ) as problem:
        raise Fault(
            f"{path} is no memory snapshot: {' '.join(str(problem).split()) or type(problem).__name__}"
        ) from None
    return Snapshot(path, reserved, sum(size for size, _ in live.values()), peak, holders)


def _replay(trace: list[dict], live: dict[int, tuple[int, str]]) -> tuple[int, Counter]:
    """Walk the history backwards from the live blocks to the highest point, then list who held memory there."""
    held, now = dict(live), sum(size for size, _ in live.values())
    peak, at = now, len(trace)
    for position in range(len(trace) - 1, -1, -1):
        event = trace[position]
        if event["action"] == "alloc":
            size, _ = held.pop(event["addr"], (event["size"], ""))
            now -= size
        elif event["action"] == "free_completed":
            held[event["addr"]] = (int(event["size"]), _frame(event.get("frames")))
            now += int(event["size"])
        if now > peak:
            peak, at = now, position
    holders: Counter = Counter()
    for event in trace[:at]:  # forward again from the beginning of the history
        if event["action"] == "alloc":
            held[event["addr"]] = (int(event["size"]), _frame(event.get("frames")))
        elif event["action"] == "free_completed":
            held.pop(event["addr"], None)
    for size, frame in held.values():
        holders[frame] += size
    return peak, holders


def _frame(frames: list[dict] | None) -> str:
    """The innermost Python frame that is not torch's own."""
    for frame in frames or []:
        file = frame.get("filename", "")
        if file.endswith(".py") and "/torch/" not in file:
            return f"{Path(file).name}:{frame.get('line')} {frame.get('name')}"
    return "(no Python frame)"
