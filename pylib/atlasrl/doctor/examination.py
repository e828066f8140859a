"""Examine one node: every check, in the order in which one would look."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from atlasrl.doctor import devices, links, software, system, traps
from atlasrl.doctor import expected as expectations
from atlasrl.doctor.expected import Expected
from atlasrl.doctor.finding import Check, Fact, Finding, Report, carried_out
from atlasrl.doctor.host import Host
from atlasrl.errors import UsageFault

ANYWHERE: dict[str, Check] = {
    "limits": system.check_limits,
    "shared memory": system.check_shared_memory,
    "memory": system.check_memory,
    "processor": system.check_processor,
    "folders": system.check_folders,
    "interface": system.check_interface,
    "versions": software.check_versions,
    "fixes": traps.check_fixes,
    "imports": software.check_imports,
}
ASCEND: dict[str, Check] = {
    "driver": software.check_driver,
    "CANN": software.check_cann,
    "environment": software.check_variables,
    "devices": devices.check_devices,
    "links": links.check_links,
    "softmax_scale": traps.check_softmax_scale,
    "mbridge": traps.check_mbridge,
    "vLLM": traps.check_vllm,
    "conflicts": traps.check_conflicts,
}


def checks(device: str) -> dict[str, Check]:
    return {**ASCEND, **ANYWHERE} if device == "npu" else ANYWHERE


def refuse_unknown(names: Collection[str], device: str) -> None:
    """Raises UsageFault on a name that is no check of the device."""
    if unknown := set(names) - checks(device).keys():
        raise UsageFault(f"no check is called {', '.join(sorted(unknown))}; there are {', '.join(checks(device))}")


def examine(host: Host, expected: Expected, *, without: Collection[str] = ()) -> Report:
    """Run every check on a node. Nothing is changed but a temporary file in each of the site's folders.

    Args:
        without: names of checks to leave out, for example `imports`, which take up to a minute.
    """
    said = list(_said(host, expected, without))
    found = [one for one in said if isinstance(one, Finding)]
    return Report(host.name, expected.device, found, [one for one in said if isinstance(one, Fact)])


def findings(
    device: str,
    *,
    stack_name: str | None = None,
    devices_per_node: int | None = None,
    nic: str | None = None,
    paths: tuple[Path, ...] = (),
    without: Collection[str] = (),
) -> list[Finding]:
    """What is to be said of this node, for the preflight stage. States: ok, warn, error."""
    expected = expectations.of(device, stack_name=stack_name, devices=devices_per_node, nic=nic, paths=paths)
    return examine(Host(), expected, without=without).findings


def _said(host: Host, expected: Expected, without: Collection[str]) -> Iterator[Finding | Fact]:
    for name, check in checks(expected.device).items():
        if name not in without:
            yield from carried_out(name, check, host, expected)
