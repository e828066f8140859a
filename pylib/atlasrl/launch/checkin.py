"""What a node says of itself before a job starts on it, and what of that would spoil the job.

Every node writes its answer into the shared job folder; rank 0 compares them all with its own, so that one start names
every node that lacks something: the folder, the interface, a package, a variable, a port.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from atlasrl import installed
from atlasrl import plan as plans
from atlasrl.errors import Fault
from atlasrl.launch import addresses, ports
from atlasrl.plan import Plan

# Variables that steer Ray, torch, vLLM, HCCL and CANN. Others (HOSTNAME, TMPDIR, SLURM_*) differ by right.
STEERING = (
    *("ACL_", "ASCEND_", "ATB_", "CANN_", "CPU_AFFINITY", "CUDA_", "GLOO_", "GOMP_", "HCCL_", "HF_", "KMP_", "LCCL_"),
    *("LD_", "MINDIE_", "NCCL_", "NPU_", "OMP_", "PYTHON", "PYTORCH_", "RAY_", "TASK_QUEUE", "TOKENIZERS_", "TORCH"),
    *("TP_", "TRITON_", "VERL_", "VLLM_"),
)
PER_NODE = {"ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HCCL_IF_IP", "VLLM_HOST_IP"}
CANN_VERSIONS = (
    "/usr/local/Ascend/ascend-toolkit/latest/version.cfg",
    "/usr/local/Ascend/driver/version.info",
    "/usr/local/Ascend/firmware/version.info",
)


def answer(plan: Plan, node: str, rank: int) -> dict:
    """This node's address and facts; `faults` holds what is wrong by itself, in whole sentences."""
    told = {"node": node, "address": None, "faults": [], "facts": facts(plan), "held": {}}
    if short := missing_devices(plan, node):
        told["faults"].append(short)
    try:
        told["address"] = own_address(plan, node, rank)
        told["held"] = {str(port): who for port, who in ports.held_ports().items()}
    except Fault as fault:
        told["faults"].append(str(fault))
    return told


def missing_devices(plan: Plan, node: str, folder: Path = Path("/dev")) -> str | None:
    """Why a node cannot offer the planned NPUs; None when it can, or when a CPU emulates them."""
    if plan.recipe.device != "npu":
        return None
    found = sorted(path.name for path in folder.glob("davinci[0-9]*"))
    if chosen := os.environ.get("ASCEND_RT_VISIBLE_DEVICES"):
        found = [name for name in found if name.removeprefix("davinci") in chosen.split(",")]
    if len(found) >= plan.devices_per_node:
        return None
    return (
        f"{node}: {len(found)} NPUs are there ({', '.join(found) or f'no {folder}/davinci*'}) and "
        f"{plan.devices_per_node} are planned; look at `npu-smi info` there, or pass --devices"
    )


def own_address(plan: Plan, node: str, rank: int) -> str:
    """The IPv4 address by which the other nodes of the job reach this one. Raises Fault."""
    if plan.site.shares_host:
        return plans.local_address(rank)
    if plan.site.nic:
        return addresses.of_interface(plan.site.nic, node)
    return addresses.of_host(platform.node(), node)


def facts(plan: Plan) -> dict[str, str]:
    """What must be equal on all nodes of a job: name -> value."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in installed.pins("cpu" if plan.recipe.device == "cpu" else "npu"):
        try:
            found[f"package {name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[f"package {name}"] = "not installed"
    found["this clone's code"] = code_hash(plans.ROOT / "pylib")
    for path in map(Path, CANN_VERSIONS):
        if path.exists():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return found | steering_variables()


def steering_variables() -> dict[str, str]:
    """Environment variables that must be equal on all nodes."""
    chosen = {name for name in os.environ if name.startswith(STEERING)} - PER_NODE
    return {f"${name}": os.environ[name] for name in sorted(chosen)}


def code_hash(folder: Path) -> str:
    """One hash of all Python files below a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def problems(answers: list[dict]) -> list[str]:
    """What speaks against starting, one sentence per node and cause; the first answer is rank 0's."""
    found = [fault for each in answers for fault in each["faults"]]
    head = answers[0]
    for other in answers[1:]:
        if lines := list(differences(head["facts"], other["facts"])):
            shown = "; ".join(lines[:3]) + (f"; {len(lines) - 3} more" if len(lines) > 3 else "")
            found.append(f"{other['node']}: its environment differs from {head['node']}'s: {shown}")
    seen: dict[str, str] = {}
    for each in answers:
        if each["address"] in seen:
            found.append(f"{each['node']} and {seen[each['address']]} have the same address {each['address']}; set nic")
        elif each["address"]:
            seen[each["address"]] = each["node"]
    return found


def differences(mine: dict[str, str], theirs: dict[str, str]) -> Iterable[str]:
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield f"{name} is {_shown(theirs.get(name))} there and {_shown(mine.get(name))} here"


def _shown(value: str | None) -> str:
    return "absent" if value is None else repr(value) if len(value) <= 60 else repr(value[:57] + "...")


def agree_on_ports(seed: str, answers: list[dict]) -> ports.PortPlan:
    """The first block of ports, in the job's own order, in which no node has a port that is held. Raises Fault."""

    def taken(port: int) -> str | None:
        for each in answers:
            if who := each["held"].get(str(port)):
                return f"{who} on {each['node']}"
        return None

    return ports.plan(seed, taken=taken)
