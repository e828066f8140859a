"""Profiler tables in the two published layouts, with planted peaks, HCCL shares, leaks and sleeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MB = 2**20
START = 1_706_704_429_088_523.0  # microseconds since 1970, as the profilers write


@dataclass(frozen=True)
class Row:
    """One moment of one component; sizes in MB, None when the profiler saw only the release."""

    component: str
    seconds: float
    reserved: float | None
    allocated: float | None = None


def torch_npu_record(path: Path, rows: Iterable[Row]) -> Path:
    """memory_record.csv of torch_npu: MB, tabs behind the times, APP without allocated, CRLF."""
    with path.open("w", newline="") as file:
        file.write(
            "Component,Timestamp(us),Total Allocated(MB),Total Reserved(MB),Total Active(MB),Stream Ptr,Device Type\r\n"
        )
        for row in rows:
            unknown = -1 / 1024
            reserved = unknown if row.reserved is None else row.reserved
            allocated = "" if row.allocated is None else row.allocated
            time = f"{START + row.seconds * 1e6:.3f}\t"
            file.write(f"{row.component},{time},{allocated},{reserved},{allocated},1431569360,NPU:0\r\n")
    return path


def msprof_module(path: Path, rows: Iterable[Row]) -> Path:
    """npu_module_mem_<suffix>.csv of CANN's msprof: KB, with a device column in front; -1 for the unknown."""
    with path.open("w") as file:
        file.write("Device_id,Component,Timestamp(us),Total Reserved(KB),Device\n")
        for row in rows:
            reserved = -1 if row.reserved is None else row.reserved * 1024
            file.write(f"0,{row.component},{START + row.seconds * 1e6:.3f},{reserved},NPU:0\n")
    return path


OPERATORS = (
    "Name,Size(KB),Allocation Time(us),Release Time(us),Active Release Time(us),Duration(us),Active Duration(us),"
    "Allocation Total Allocated(MB),Allocation Total Reserved(MB),Allocation Total Active(MB),"
    "Release Total Allocated(MB),Release Total Reserved(MB),Release Total Active(MB),Stream Ptr,Device Type\n"
)


def operator_line(name: str, size_kb: float, start: float, end: float | None, total_mb: float) -> str:
    """One allocation; `end` None for one that was never released. Seconds from START."""
    times = f"{START + start * 1e6:.3f}\t,{'' if end is None else f'{START + end * 1e6:.3f}' + chr(9)}"
    return f"{name},{size_kb},{times},,,,{total_mb},{total_mb + 64},{total_mb},,,,650460928,NPU:0\n"
