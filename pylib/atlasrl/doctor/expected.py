"""What a node should be: the pinned stack, its devices, and the folders and the interface of the site."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from atlasrl import installed, stacks

ASCEND_IMPORTS = ("torch", "torch_npu", "vllm", "vllm_ascend", "mindspeed", "megatron.core", "mbridge", "verl", "ray")
ATLAS_A2 = {"devices": 8, "hbm_mib": 65536}  # HBM as npu-smi shows it for a 910B of 64 GB


@dataclass(frozen=True)
class Expected:
    device: str
    devices: int = 0
    hbm_mib: int = 0
    driver: str | None = None
    cann: str | None = None
    packages: dict[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    nic: str | None = None
    paths: tuple[Path, ...] = ()
    """Folders that every node must see."""
    scratch: Path = Path("/tmp")
    free_bytes: int = 10 * 10**9
    """Least room in each of the paths and in scratch."""


def of(
    device: str,
    *,
    stack_name: str | None = None,
    devices: int | None = None,
    nic: str | None = None,
    paths: tuple[Path, ...] = (),
) -> Expected:
    """The pinned stack of a device.

    Args:
        device: npu, cpu or cuda.
        stack_name: for npu, a name in env/stacks; None: the default one.
        devices: per node; None: 8.
        nic: network interface of the site; None: not checked.
        paths: folders that every node must see.

    Raises:
        UsageFault: no such stack.
    """
    known = "cpu" if device == "cpu" else "npu"
    packages, imports = installed.pins(known), tuple(installed.IMPORTS[known])
    if device != "npu":
        return Expected(device, packages=packages, imports=imports, nic=nic, paths=paths)
    chosen = stacks.load(stack_name or stacks.DEFAULT["npu"])
    return Expected(
        device,
        devices=devices or ATLAS_A2["devices"],
        hbm_mib=ATLAS_A2["hbm_mib"],
        driver=chosen.driver,
        cann=chosen.cann,
        packages=packages | {name: package.version for name, package in chosen.packages.items()},
        imports=(*imports, *ASCEND_IMPORTS),
        nic=nic,
        paths=paths,
    )
