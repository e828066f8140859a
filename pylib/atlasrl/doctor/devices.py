"""The NPUs of a node through `npu-smi`: number, health, memory, versions, memory faults, who holds them.

Formats: `npu-smi info` and `npu-smi info -t board|ecc -i N`, as documented in Ascend/mind-cluster,
docs/en/faultdiag/user_guide/03_collecting_logs.md, and in modelscope/ms-swift, NPU-support.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from atlasrl.doctor.expected import Expected
from atlasrl.doctor.finding import Fact, Finding, error, ok, warn
from atlasrl.doctor.host import Answer, Host

BUS = re.compile(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d")
USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
IDLE_HBM_SHARE = 0.08  # 3.3 of 64 GiB are the driver's own on an idle 910B3
HOT_CELSIUS = 85


@dataclass(frozen=True)
class Npu:
    """One chip of the table."""

    number: int
    name: str
    health: str
    celsius: int | None
    hbm_used_mib: int
    hbm_mib: int


@dataclass(frozen=True)
class Holder:
    """A process that holds a device."""

    number: int
    pid: int
    name: str
    mib: int


def parse_table(text: str) -> tuple[list[Npu], list[Holder]]:
    """Read `npu-smi info`: two rows per chip, then the processes. Columns may be pushed right, and A3 has more."""
    chips, holders, first = [], [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) < 3:
            continue
        if BUS.fullmatch(cells[1]) and first is not None:
            _, (used, total) = ((int(a), int(b)) for a, b in USAGE.findall(cells[2]))
            chips.append(Npu(*first, used, total))
            first = None
        elif len(cells) == 3 and (match := re.fullmatch(r"(\d+)\s+(\S.*)", cells[0])):
            numbers = cells[2].split()
            celsius = int(numbers[1]) if len(numbers) > 1 and numbers[1].isdigit() else None
            first = int(match[1]), match[2], cells[1], celsius
        elif len(cells) >= 4 and cells[1].isdigit() and cells[3].isdigit():
            holders.append(Holder(int(cells[0].split()[0]), int(cells[1]), cells[2], int(cells[3])))
    return chips, holders


def check_devices(host: Host, expected: Expected) -> Iterator[Finding | Fact]:
    """Everything `npu-smi` tells; its absence or failure is one finding."""
    yield from check_device_files(host, expected)
    answer = host.run("npu-smi", "info")
    if answer is None:
        yield error(
            "npu-smi", "not installed", "install the Ascend driver, or mount /usr/local/Ascend into the container"
        )
        return
    chips, holders = parse_table(answer.text)
    if answer.code != 0 or not chips:
        yield error(
            "npu-smi", f"fails: {_first_line(answer)}", "see dmesg and /var/log/ascend_seclog; reload the driver"
        )
        return
    yield from _check_number(chips, expected)
    for chip in chips:
        yield from _check_chip(chip, expected, held=any(holder.number == chip.number for holder in holders))
    yield from _check_holders(host, holders)
    numbers = sorted({chip.number for chip in chips})
    for number, answers in ((number, partial(_ask, host, number)) for number in numbers):
        yield from _check_board(number, answers("board"))
        yield from _check_memory_faults(number, answers("ecc"))


def check_device_files(host: Host, expected: Expected) -> Iterator[Finding]:
    """The character devices; a container gets only those that it was given."""
    wanted = [*NODES, *(f"davinci{number}" for number in range(expected.devices))]
    if missing := [f"/dev/{name}" for name in wanted if not host.path(f"/dev/{name}").exists()]:
        yield error("device files", f"missing: {', '.join(missing)}", "give them to the container (--device)")


def _ask(host: Host, number: int, topic: str) -> Answer | None:
    return host.run("npu-smi", "info", "-t", topic, "-i", str(number))


def _check_number(chips: list[Npu], expected: Expected) -> Iterator[Finding | Fact]:
    yield Fact("NPU type", chips[0].name)
    if len(chips) < expected.devices:
        there = ", ".join(str(chip.number) for chip in chips)
        remedy = "a device that is gone needs a cold restart of the node; exclude the node until then"
        yield error("devices", f"{len(chips)} NPUs ({there}), {expected.devices} expected", remedy)
    else:
        yield ok("devices", f"{len(chips)} x {chips[0].name}")


def _check_chip(chip: Npu, expected: Expected, *, held: bool) -> Iterator[Finding]:
    npu = f"NPU {chip.number}"
    if chip.health != "OK":
        remedy = f"`npu-smi info -t health -i {chip.number} -c 0` names the fault; exclude the node"
        yield error("health", f"{npu} is {chip.health}", remedy)
    if chip.hbm_mib < expected.hbm_mib:
        yield error("HBM", f"{npu} has {chip.hbm_mib} MiB, {expected.hbm_mib} expected", "another card, or a bad one")
    elif not held and chip.hbm_used_mib > IDLE_HBM_SHARE * chip.hbm_mib:
        what = f"{npu} uses {chip.hbm_used_mib} of {chip.hbm_mib} MiB although npu-smi names no process"
        yield error("HBM", what, "a process of another container or a dead one holds it; find it, or reset the device")
    if chip.celsius is not None and chip.celsius >= HOT_CELSIUS:
        yield warn("temperature", f"{npu} has {chip.celsius} degrees", "look at fans and air; a hot chip is slow")


def _check_holders(host: Host, holders: list[Holder]) -> Iterator[Finding]:
    """Somebody's processes on our devices. They are named, never ended: they may be another job's."""
    for holder in holders:
        command = (host.read(f"/proc/{holder.pid}/cmdline") or "").replace("\0", " ").strip()
        who = f"process {holder.pid} ({command[:60] or holder.name}) holds NPU {holder.number} with {holder.mib} MiB"
        yield error("leftover processes", who, "end it if it is yours; else the node belongs to another job")


def _check_board(number: int, answer: Answer | None) -> Iterator[Finding | Fact]:
    board = answer.fields if answer else {}
    if firmware := board.get("Firmware Version"):
        yield Fact(f"firmware of NPU {number}", firmware)
    if board.get("Compatibility", "OK") not in ("OK", "NA"):
        remedy = "install the firmware that belongs to the driver, then restart the node"
        yield error("firmware", f"NPU {number}: driver and firmware {firmware} are not compatible", remedy)


def _check_memory_faults(number: int, answer: Answer | None) -> Iterator[Finding]:
    counts = {key: int(value) for key, value in (answer.fields if answer else {}).items() if value.isdigit()}
    if double := counts.get("HBM Double Bit Error Count", 0):
        yield error(
            "memory faults", f"NPU {number}: {double} uncorrectable HBM errors", "exclude the node; reset or replace"
        )
    if isolated := counts.get("HBM Double Bit Isolated Pages Count", 0):
        yield warn(
            "memory faults", f"NPU {number}: {isolated} HBM pages isolated", "watch it; 64 pages mean a new card"
        )


def _first_line(answer: Answer) -> str:
    lines = [line.strip() for line in answer.text.splitlines() if line.strip() and not line.startswith("+")]
    return lines[0] if lines else f"exit code {answer.code} without a word"
