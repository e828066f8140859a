"""Axis 3: does every device of the cluster compute the same? Deterministic work, bitwise compared.

Every device multiplies the same matrices, fills and reads back memory, several times over, and hands a known block to
its neighbour. Devices of one kind must agree in every bit, with each other and with themselves; one that does not is
broken, whatever its health report says. Slow ones are named too.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median

import torch

from atlasrl.precision.weights import digest

SLOW = 1.25
"""A device is slow when its median round takes so many times the median of its kind."""

BLOCK = 1 << 22
"""Elements of the block that neighbours exchange: 16 MiB."""


@dataclass(frozen=True)
class Report:
    """What one device did."""

    node: str
    device: str
    kind: str
    """product name; only devices of one kind must agree"""
    digests: list[str]
    """of the products of each round"""
    seconds: list[float]
    memory_errors: int = 0
    link: str | None = None
    """what went wrong with the block from the neighbour; None if nothing did or no link was tested"""
    link_seconds: float | None = None
    problem: str | None = None
    """the device could not do the work"""

    @property
    def name(self) -> str:
        return f"{self.node} device {self.device}"


@dataclass
class Verdict:
    """Which devices are not like the others, in words."""

    devices: int
    odd: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """node -> what is wrong with its devices; such a node must not be used"""
    slow: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ok(self) -> bool:
        return not self.odd

    def exclude(self, slow_too: bool = False) -> str:
        """Node names as Slurm's --exclude takes them."""
        return ",".join(sorted({*self.odd, *(self.slow if slow_too else ())}))

    def as_json(self) -> dict:
        return {"devices": self.devices, "odd": dict(self.odd), "slow": dict(self.slow), "exclude": self.exclude()}


def work(size: int, rounds: int, device: torch.device | str, memory: int = 1 << 26) -> dict:
    """Rounds of the same matrix products and of a memory pattern; the same on every device of one kind.

    Args:
        size: rows and columns of the matrices.
        memory: bytes to fill and read back.

    Returns:
        {"digests": [...], "seconds": [...], "memory_errors": int}
    """
    generator = torch.Generator().manual_seed(20251106)
    left, right = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
    digests, seconds, errors = [], [], 0
    for number in range(rounds):
        began = time.perf_counter()
        product = left
        for dtype in (torch.float32, torch.bfloat16):
            for _ in range(4):
                product = torch.nn.functional.layer_norm((product.to(dtype) @ right.to(dtype)).float(), (size,))
        digests.append(digest(product))
        errors += memory_errors(memory, device, number)
        seconds.append(time.perf_counter() - began)
    return {"digests": digests, "seconds": seconds, "memory_errors": errors}


def memory_errors(size: int, device: torch.device | str, number: int) -> int:
    """Words of a pattern, and of its complement, that memory did not keep."""
    pattern = torch.arange(size // 8, device=device, dtype=torch.int64) * 0x9E3779B97F4A7C1 + number
    kept, inverse = pattern.clone(), ~pattern
    return int((kept != pattern).sum()) + int((~inverse != pattern).sum())


def block(sender: int) -> torch.Tensor:
    """What device `sender` hands to its neighbour."""
    return torch.arange(BLOCK, dtype=torch.float32).mul_(sender + 1).sin_()


def judge(reports: Iterable[Report], slow: float = SLOW) -> Verdict:
    """Name the devices that differ from the majority of their kind, from themselves, or in speed."""
    kinds: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        kinds[report.kind].append(report)
    verdict = Verdict(sum(map(len, kinds.values())))
    for alike in kinds.values():
        working = [report for report in alike if report.problem is None]
        votes = Counter(found for report in working for found in report.digests)
        usual, count = votes.most_common(1)[0] if votes else ("", 0)
        agreed = count > sum(votes.values()) / 2
        pace = median(median(report.seconds) for report in working) if working else 0.0
        links = [report.link_seconds for report in working if report.link_seconds is not None]
        for report in alike:
            verdict.odd[report.node] += [f"{report.name}: {what}" for what in _faults(report, usual, agreed)]
            verdict.slow[report.node] += [f"{report.name}: {what}" for what in _delays(report, pace, links, slow)]
    verdict.odd = {node: found for node, found in verdict.odd.items() if found}
    verdict.slow = {node: found for node, found in verdict.slow.items() if found}
    return verdict


def _faults(report: Report, usual: str, agreed: bool) -> Iterable[str]:
    if report.problem is not None:
        yield f"could not do the work: {report.problem}"
        return
    if len(set(report.digests)) > 1:
        different = len(set(report.digests))
        yield f"gives {different} different results for the same products in {len(report.digests)} rounds"
    elif not agreed:
        yield "no majority of its kind agrees on a result; test more devices"
    elif report.digests[0] != usual:
        yield f"computes {report.digests[0]}, the majority of its kind {usual}"
    if report.memory_errors:
        yield f"memory lost {report.memory_errors} of the words written to it"
    if report.link is not None:
        yield report.link


def _delays(report: Report, pace: float, links: list[float], slow: float) -> Iterable[str]:
    if report.problem is None and pace and median(report.seconds) > slow * pace:
        yield f"takes {median(report.seconds) / pace:.2f} times as long as its kind"
    if report.link_seconds is not None and report.link_seconds > 2 * slow * median(links):
        yield f"its link takes {report.link_seconds / median(links):.1f} times as long as the others"


def lines(reports: list[Report], verdict: Verdict) -> Iterable[str]:
    """The report for a person."""
    for kind in sorted({report.kind for report in reports}):
        alike = [report for report in reports if report.kind == kind and report.problem is None]
        pace = f"{median(median(r.seconds) for r in alike):.3f} s a round" if alike else "none works"
        yield f"{kind}: {len(alike)} devices on {len({r.node for r in alike})} nodes, {pace}"
    for title, found in (("odd", verdict.odd), ("slow", verdict.slow)):
        for sentences in found.values():
            yield from (f"{title:5} {sentence}" for sentence in sentences)
    if verdict.ok:
        yield f"all {verdict.devices} devices agree in every bit"


def as_json(reports: list[Report], verdict: Verdict) -> dict:
    return {"verdict": verdict.as_json(), "reports": [asdict(report) for report in reports]}
