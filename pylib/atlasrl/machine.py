"""Whether this machine bears a local run: memory needed against memory there."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from atlasrl.errors import UsageFault

# Measured resident memory of a CPU run (Ray 2.60, verl 0.7.0, torch 2.13): see docs/design.md.
DRIVER_GB, NODE_GB, WORKER_GB = 1.0, 0.55, 0.75
BYTES_PER_PARAMETER = 20  # FP32 weights, gradients, two Adam moments, and the rollout's copy


def parameters(model: Path) -> int:
    """Parameters of a Hugging Face checkpoint, from file sizes: FP8 has one byte each, BF16 two. 0 when unknown."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    try:
        quantized = "quantization_config" in json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        quantized = False
    return size if quantized else size // 2


def memory_needed(model: Path, nodes: int, devices_per_node: int) -> tuple[float, str]:
    """GB that a local run takes, and why."""
    workers = nodes * devices_per_node
    weights = parameters(model) * BYTES_PER_PARAMETER / 1e9
    needed = DRIVER_GB + nodes * NODE_GB + workers * WORKER_GB + weights
    reason = (
        f"driver {DRIVER_GB} + {nodes} Ray nodes × {NODE_GB} + {workers} workers × {WORKER_GB} "
        f"+ model state {weights:.1f}"
    )
    return needed, reason


def check_memory(model: Path, nodes: int, devices_per_node: int, available_gb: float | None = None) -> str:
    """Refuse a local run that this machine cannot hold; return the verdict in words.

    Raises:
        UsageFault: with the memory needed, the memory there, and how many nodes fit.
    """
    available = available_gb if available_gb is not None else psutil.virtual_memory().available / 1e9
    needed, reason = memory_needed(model, nodes, devices_per_node)
    if needed > available:
        a_node = NODE_GB + devices_per_node * WORKER_GB
        fits = max(int((available - (needed - nodes * a_node)) / a_node), 0)
        advice = f"ask for at most NODES={fits}" if fits else "no node fits"
        raise UsageFault(
            f"{nodes} nodes on this machine need about {needed:.0f} GB ({reason}) and {available:.0f} GB are "
            f"available; {advice}, or use a site of kind slurm or ssh"
        )
    return f"{available:.0f} GB available, about {needed:.0f} GB needed"
