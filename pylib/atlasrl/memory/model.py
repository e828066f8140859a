"""Device memory of every pipeline stage in every phase of a HybridEngine step, and host memory of a node.

Megatron training and vLLM rollout share the devices (verl 0.7.0). A phase is a dictionary term -> bytes; `terms.py`
explains every term. What is predicted is what the model, the schedule and verl's own moves need; `runtime` stands for
the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from atlasrl.legality import RolloutSplit, Split
from atlasrl.memory import activations, parameters
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.job import Job
from atlasrl.memory.parameters import Count, share

WEIGHT, OPTIMIZER = 2, 12  # bytes a parameter: bf16; fp32 master and two moments
CACHE_BLOCK = 128  # tokens of one KV block on Ascend

Phase = dict[str, int]


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: what a rank of it holds, bytes by phase and term."""

    rank: int
    layers: int
    count: Count
    phases: dict[str, Phase]

    @cached_property
    def peaks(self) -> dict[str, int]:
        return {phase: sum(terms.values()) for phase, terms in self.phases.items()}


@dataclass(frozen=True)
class Prediction:
    split: Split
    job: Job
    stages: tuple[Stage, ...]
    cache_tokens: int  # KV tokens of one rollout replica's rank
    host: dict[str, int]  # bytes of one node by use

    @cached_property
    def tightest(self) -> tuple[Stage, str, int]:
        """(stage, phase, bytes) of the highest peak."""
        return max(
            ((stage, phase, peak) for stage in self.stages for phase, peak in stage.peaks.items()), key=lambda x: x[2]
        )

    @property
    def spare(self) -> int:
        """Bytes left at the highest peak; negative when it does not fit."""
        return self.job.device - self.tightest[2]

    @property
    def sequences(self) -> int:
        """Answers of full length that the KV cache of one rank holds at once."""
        return self.cache_tokens // self.job.sequence

    @property
    def fits(self) -> bool:
        return self.spare >= 0 and self.sequences >= 1


def predict(a: Architecture, s: Split, j: Job) -> Prediction:
    """Predict the memory of a legal split (`legality.broken_rules` yields nothing)."""
    shared = shared_terms(a, s, j)
    stages = tuple(stage(a, s, j, rank, shared) for rank in range(s.pipeline))
    return Prediction(s, j, stages, cache_tokens(a, j), host_bytes(a, s, j))


class Shared(NamedTuple):
    """Terms that are the same on every stage."""

    engine: Phase  # what the rollout engine holds while it generates
    engine_weights: Phase  # what it holds while weights flow in
    base: Phase  # what stays through all phases


def shared_terms(a: Architecture, s: Split, j: Job) -> Shared:
    communication = communication_bytes(s, j) if j.communication is None else j.communication
    return Shared(
        rollout_terms(a, j), rollout_weights(a, j.rollout), {"communication": communication, "runtime": j.runtime}
    )


def stage(a: Architecture, s: Split, j: Job, rank: int, shared: Shared) -> Stage:
    """Bytes of one rank of pipeline stage `rank`, by phase and term."""
    count = parameters.stage(a, s, rank)
    weights = {"weights": WEIGHT * count.total}
    gradients = {"gradients": j.gradient_bytes * count.total}
    optimizer = {"optimizer": optimizer_bytes(count, s, j)}
    reference = {"reference weights": weights["weights"]} if j.reference else {}
    resident = {} if j.offload else gradients | optimizer | reference
    base = shared.base

    act = activations.of_stage(a, s, rank, j.tokens, j.micro_batches, j.recompute)
    last = rank == s.pipeline - 1
    local = share(j.tokens, s.context)
    # The logits are gone when the first recomputed layer needs its activations: the larger of the two counts.
    update_logits = local * activations.logits_bytes(a, s.tensor, j.update_logit_bytes) if last else 0
    hump = {"logits": update_logits} if update_logits >= act.transient else {"recomputed": act.transient}
    scoring = {"one layer": act.largest_layer}
    if last:
        scoring["logits"] = local * activations.logits_bytes(a, s.tensor, j.score_logit_bytes)

    trained = weights | gradients | optimizer | ({} if j.offload else reference)
    held = resident if j.offload else weights | resident
    phases = {
        "reshard": weights | resident | shared.engine_weights | {"export buffer": export_buffer(a)} | base,
        "rollout": held | shared.engine | base,
        "log_prob": weights | resident | scoring | base,
        "update": trained | {"activations": act.kept} | hump | base,
        "step": trained | base,
    }
    if j.reference:
        own = reference if j.offload else weights | resident
        phases["reference"] = own | scoring | base
    return Stage(rank, s.stages[rank], count, phases)


def optimizer_state(count: Count, s: Split, j: Job) -> int:
    """Optimizer state of one rank, wherever it lives."""
    groups = (s.data * s.context, s.expert_data) if j.distributed_optimizer else (1, 1)
    return share(OPTIMIZER * count.dense, groups[0]) + share(OPTIMIZER * count.expert, groups[1])


def optimizer_bytes(count: Count, s: Split, j: Job) -> int:
    """Optimizer state of one rank on the device."""
    state = optimizer_state(count, s, j)
    return state - int(state * j.optimizer_on_host)


@functools.lru_cache(maxsize=256)
def rollout_weights(a: Architecture, r: RolloutSplit) -> Phase:
    """The engine's weights on one rank, with the copies that absorbed attention keeps beside them."""
    absorbed = WEIGHT * parameters.absorbed_copies(a, r)
    return {"rollout weights": WEIGHT * parameters.rollout(a, r).total} | (
        {"absorbed copies": absorbed} if absorbed else {}
    )


def rollout_terms(a: Architecture, j: Job) -> Phase:
    """What the engine holds while it generates, on one rank."""
    own = rollout_weights(a, j.rollout) | {"rollout activations": j.rollout_activations}
    cache = int(j.memory_fraction * j.device) - sum(own.values())
    return own | {"KV cache": max(cache, 0)}


def cache_tokens(a: Architecture, j: Job) -> int:
    """Tokens that fit into the KV cache of one rank, in whole blocks."""
    free = rollout_terms(a, j)["KV cache"]
    return free // parameters.cache_bytes_per_token(a, j.rollout.tensor) // CACHE_BLOCK * CACHE_BLOCK


@functools.lru_cache(maxsize=64)
def export_buffer(a: Architecture) -> int:
    """Bytes of the gathered shards of the largest tensor and of their concatenation."""
    return 2 * WEIGHT * max(w.size for w in (*a.outer_weights, *a.layer_weights(True), *a.layer_weights(False)))


def communicators(s: Split, r: RolloutSplit) -> Iterator[str]:
    """Process groups of one rank that move data through the device, each with buffers of its own.

    Megatron-core 0.12.1 `initialize_model_parallel` makes a communicator per group even where the ranks are the same.
    """
    sizes = {
        "world": s.world,
        "tensor": s.tensor,
        "pipeline": s.pipeline,
        "data": s.data,
        "data with context": s.data * s.context,
        "context": s.context,
        "model (tensor, pipeline)": s.tensor * s.pipeline,
        "tensor with data": s.tensor * s.data,
        "tensor with context": s.tensor * s.context if s.context > 1 else 1,
        "expert": s.expert,
        "expert tensor": s.expert_tensor,
        "tensor with expert": s.expert * s.expert_tensor,
        "expert model (with pipeline)": s.expert * s.expert_tensor * s.pipeline if s.expert > 1 else 1,
        "expert data": s.expert_data if s.expert > 1 else 1,
        "embedding": s.pipeline,
        "rollout world": s.world,
        "rollout tensor": r.tensor,
        "rollout data": r.ranks // r.tensor,
        "rollout expert": r.expert,
        "verl rollout mesh, replicas": s.world // r.ranks,
        "verl rollout mesh, replica": r.ranks,
    }
    return (name for name, size in sizes.items() if size > 1)


def communication_bytes(s: Split, j: Job) -> int:
    """HCCL's buffers: two of HCCL_BUFFSIZE for every communicator."""
    return 2 * j.buffer * sum(1 for _ in communicators(s, j.rollout))


def host_bytes(a: Architecture, s: Split, j: Job) -> dict[str, int]:
    """Host memory of one node by use: what offloading and vLLM's sleep level 1 keep there (worst stage)."""
    largest = max((parameters.stage(a, s, rank) for rank in range(s.pipeline)), key=lambda count: count.total)
    weights, on_device = WEIGHT * largest.total, optimizer_bytes(largest, s, j)
    uses = {
        "offloaded weights": weights if j.offload else 0,
        "offloaded optimizer": on_device if j.offload else 0,
        # Megatron's HybridDeviceOptimizer also pins fp32 gradients there: 4 bytes beside the 12.
        "host optimizer": (optimizer_state(largest, s, j) - on_device) * 4 // 3,
        "reference weights": weights if j.reference and j.offload else 0,
        "sleeping rollout weights": sum(rollout_weights(a, j.rollout).values()),
    }
    return {use: size * j.devices_per_node for use, size in uses.items() if size}
