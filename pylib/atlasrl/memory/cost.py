"""What a split costs in time: seconds per training step from first principles, to rank splits that fit.

The rates are public data-sheet values of an Atlas 800T A2 (Ascend 910B) and rough efficiencies; nothing was measured
on a device. Orders and differences carry meaning, absolute seconds do not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from atlasrl.legality import RolloutSplit, Split
from atlasrl.memory import model, parameters
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.job import Job
from atlasrl.memory.parameters import share


@dataclass(frozen=True)
class Machine:
    """Rates of one device: FLOP/s, then bytes/s."""

    compute: float = 313e12 * 0.35  # dense bf16 peak x a usual share of it
    memory: float = 1.6e12  # HBM
    node: float = 196e9  # HCCS, one direction
    network: float = 25e9  # 200 Gb/s RoCE per device
    host: float = 20e9  # PCIe 4.0 x16
    host_step: float = 5e9  # memory traffic of the optimizer on the CPU cores that one device gets


ATLAS = Machine()


@functools.lru_cache(maxsize=64)
def _active_layer(a: Architecture, dense: bool) -> int:
    """Parameters of one layer that a token passes through."""
    count = parameters.layer(a, dense, parameters.WHOLE)
    return count.dense + (count.expert * a.experts.top // a.experts.count if count.expert else 0)


def step_seconds(a: Architecture, s: Split, j: Job, machine: Machine = ATLAS) -> dict[str, float]:
    """Seconds of one training step by cause; their sum ranks the splits."""
    tokens = j.batch_sequences * j.sequence
    again = 1 if j.recompute.granularity == "full" else 0.3 if j.recompute.granularity == "selective" else 0
    passes = 1 + 2 + again + 1  # forward, backward, recomputed forward, scoring forward
    local = share(tokens, s.data * s.context)  # tokens one rank sees
    slowest, mean = _stage_work(a, s)
    compute = 2 * passes * mean * s.pipeline * tokens / s.world / machine.compute
    optimizer_steps = max(1, round(tokens / (s.data * j.tokens * j.micro_batches)))
    causes = {
        "compute": compute,
        "uneven stages": compute * (slowest / mean - 1),
        "pipeline bubble": compute * slowest / mean * (s.pipeline - 1) / (s.virtual * j.micro_batches),
        "tensor traffic": _tensor_bytes(a, s, local, passes) / machine.node,
        "context traffic": _context_seconds(a, s, j, local, passes, machine),
        "expert traffic": _expert_seconds(a, s, j, local, passes, machine),
        "gradient traffic": optimizer_steps * _gradient_bytes(a, s) / machine.network,
        "offload traffic": _offload_seconds(a, s, j, optimizer_steps, machine),
        "generation": generation_seconds(a, s.world, j, machine),
    }
    return {cause: seconds for cause, seconds in causes.items() if seconds}


def _stage_work(a: Architecture, s: Split) -> tuple[float, float]:
    """Active parameters of the slowest stage and of the mean one."""
    work, first = [], 0
    for layers in s.stages:
        dense = a.dense_among(first, first + layers)
        mixture = layers - dense
        work.append(
            (dense * _active_layer(a, True) if dense else 0) + (mixture * _active_layer(a, False) if mixture else 0)
        )
        first += layers
    work[-1] += a.vocabulary * a.hidden
    return max(work), sum(work) / len(work)


def _tensor_bytes(a: Architecture, s: Split, local: int, passes: float) -> float:
    """Four all-gathers or reduce-scatters of [s, b, h] a layer and forward pass, as many in each half of a backward."""
    layers = max(s.stages)
    return 4 * passes * layers * local * a.hidden * 2 * (s.tensor - 1) / s.tensor


def _context_seconds(a: Architecture, s: Split, j: Job, local: int, passes: float, machine: Machine) -> float:
    """Ring attention passes keys and values of every other rank along."""
    width = a.heads * (a.latent.query + a.latent.value) if a.latent else 2 * a.kv_heads * a.head_width
    volume = passes * max(s.stages) * local * width / s.tensor * 2 * (s.context - 1)
    return volume / (machine.node if s.tensor * s.context <= j.devices_per_node else machine.network)


def _expert_seconds(a: Architecture, s: Split, j: Job, local: int, passes: float, machine: Machine) -> float:
    """Tokens go to the ranks of their experts and back; EP ranks are neighbours, so small groups stay in a node."""
    if a.experts is None or s.expert == 1:
        return 0.0
    volume = 2 * passes * max(s.stages) * local / s.tensor * a.experts.top * a.hidden * 2
    group = s.expert * s.expert_tensor
    inside = min(group, j.devices_per_node)
    return volume / group * ((inside - 1) / machine.node + (group - inside) / machine.network)


def _gradient_bytes(a: Architecture, s: Split) -> float:
    """Reduce-scatter of fp32 gradients and all-gather of bf16 weights over the data-parallel ranks, largest stage."""
    dense, expert = max((parameters.stage(a, s, rank) for rank in range(s.pipeline)), key=lambda count: count.total)
    groups = s.data * s.context
    return 6 * (dense * (groups - 1) / groups + expert * (s.expert_data - 1) / s.expert_data)


def _offload_seconds(a: Architecture, s: Split, j: Job, optimizer_steps: int, machine: Machine) -> float:
    count = max((parameters.stage(a, s, rank) for rank in range(s.pipeline)), key=lambda count: count.total)
    moved = 0.0
    if j.offload:  # weights go in and out for reshard, log_prob and update; the optimizer for update
        moved += 6 * model.WEIGHT * count.total + 2 * model.optimizer_bytes(count, s, j)
    state = model.optimizer_state(count, s, j) - model.optimizer_bytes(count, s, j)
    moved += optimizer_steps * state * 6 / 12  # fp32 gradients out, bf16 weights back
    return moved / machine.host + optimizer_steps * 2 * state / machine.host_step


@functools.lru_cache(maxsize=1024)
def generation_seconds(a: Architecture, world: int, j: Job, machine: Machine = ATLAS) -> float:
    """Decoding reads the weights and the caches once a token; answers beyond the cache wait for another wave."""
    r: RolloutSplit = j.rollout
    concurrent = max(1, model.cache_tokens(a, j) // j.sequence)
    answers = share(j.batch_sequences, max(1, world // r.tensor))  # of one engine (a TP group)
    waves = share(answers, concurrent)
    weights = model.WEIGHT * parameters.rollout(a, r).total
    caches = min(answers, concurrent) * j.sequence / 2 * parameters.cache_bytes_per_token(a, r.tensor)
    return waves * j.sequence * (weights + caches) / machine.memory
