"""Activations that training keeps for the backward pass: bytes per token of one layer, and what a stage holds.

The list of tensors is "the output of every operation once" in bf16 with sequence parallelism, flash attention and no
dropout. With DeepSeek-V3 and TP 8 it gives the numbers that a public report of this very set-up printed, to the last
digit: 40,464 bytes a token for a dense layer, 151,568 for a mixture layer. It is not the only list with these sums
(autograd keeps the expanded q, k, v of flash attention: 8 MiB more a layer at 4096 tokens), and for GQA models no
printed number exists.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from atlasrl.legality import Split
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.parameters import share

ITEM = 2  # bytes of a bf16 activation
DISPATCHED = 7  # copies of a routed token: permuted, sent, sorted, fc2 out, unsorted, returned, weighted


@dataclass(frozen=True)
class Recompute:
    """What is thrown away after the forward pass and computed again in the backward pass (Megatron's words)."""

    granularity: str = "none"  # none, selective, full
    method: str = "uniform"  # full: uniform groups of `layers` keep their input; block: only the first `layers`
    layers: int = 1
    modules: frozenset[str] = frozenset()  # selective


# Tensors that `selective` drops, by module (Megatron-core 0.12.1, transformer_config.recompute_modules).
DROPPED = {
    "layernorm": ("norm_outputs",),
    "mla_up_proj": ("q_up", "kv_up"),
    "moe_act": ("expert_activation",),
    "mlp": ("mlp_in", "mlp_activation"),
    "moe": ("dispatched", "expert_in", "expert_activation", "shared_in", "shared_activation"),
}


@functools.lru_cache(maxsize=4096)
def layer_tensors(
    a: Architecture, dense: bool, tensor: int, expert_tensor: int = 1, shared_split: bool = False
) -> dict[str, int]:
    """Bytes per token of every kept tensor of one layer on one rank.

    `shared_split` divides the shared expert by TP, as Megatron does, and counts the six [s/TP, b, h] tensors that then
    make up the printed sum; the default counts it whole. Both agree for DeepSeek-V3 and differ for other models.
    """

    def over_tp(elements: int) -> int:
        return share(ITEM * elements, tensor)

    tensors = {"norm_inputs": over_tp(2 * a.hidden), "norm_outputs": over_tp(2 * a.hidden)}
    if m := a.latent:
        tensors["q_down"] = over_tp(2 * m.q_rank)  # and its norm
        tensors["kv_down"] = over_tp(m.kv_rank + m.rope) + over_tp(m.kv_rank)
        tensors["q_up"] = over_tp(a.heads * m.query)
        tensors["kv_up"] = over_tp(a.heads * (m.nope + m.value))
        tensors["attention_out"] = over_tp(a.heads * m.value)
    else:
        tensors["qkv"] = over_tp((a.heads + 2 * max(a.kv_heads, tensor)) * a.head_width)
        tensors["attention_out"] = over_tp(a.heads * a.head_width)
    if dense:
        tensors |= {"mlp_in": over_tp(2 * a.intermediate), "mlp_activation": over_tp(a.intermediate)}
        return tensors
    e = a.experts
    tensors["dispatched"] = over_tp(e.top * DISPATCHED * a.hidden * expert_tensor)
    tensors["expert_in"] = over_tp(e.top * 2 * e.width)
    tensors["expert_activation"] = over_tp(e.top * e.width)
    if shared_split:
        tensors["shared_in"] = over_tp(2 * e.shared_width)
        tensors["shared_activation"] = over_tp(e.shared_width) + over_tp(6 * a.hidden)
    else:
        tensors["shared_in"] = ITEM * 2 * e.shared_width
        tensors["shared_activation"] = ITEM * e.shared_width
    return tensors


def layer_bytes(a: Architecture, dense: bool, tensor: int, expert_tensor: int = 1, shared_split: bool = False) -> int:
    """Bytes per token that one layer keeps without recomputation."""
    return sum(layer_tensors(a, dense, tensor, expert_tensor, shared_split).values())


def input_bytes(a: Architecture, tensor: int) -> int:
    """Bytes per token of a layer's input, or of the embedding's output: [s/TP, b, h]."""
    return share(ITEM * a.hidden, tensor)


def logits_bytes(a: Architecture, tensor: int, per_logit: int = 4) -> int:
    """Bytes per token of the vocabulary-parallel logits."""
    return share(per_logit * a.vocabulary, tensor)


def in_flight(pipeline: int, rank: int, micro_batches: int, virtual: int = 1) -> int:
    """Micro-batches (virtual > 1: chunks, each 1/virtual of a stage) whose activations stage `rank` holds at once.

    1F1B keeps pipeline - rank of them; the interleaved schedule warms up 2(pipeline - rank - 1) + (virtual - 1)pipeline
    chunks before the first backward (arXiv 2104.04473, section 2.2).
    """
    if virtual == 1:
        return min(micro_batches, pipeline - rank)
    return min(micro_batches * virtual, 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1)


@dataclass(frozen=True)
class StageActivations:
    """Bytes on one rank. `kept` lives through the whole update; `transient` only while a layer is recomputed."""

    kept: int
    transient: int
    largest_layer: int  # of one layer's full activations, for forward passes without a graph


def of_stage(
    a: Architecture, s: Split, rank: int, tokens: int, micro_batches: int, recompute: Recompute
) -> StageActivations:
    """Activations of pipeline stage `rank` for micro-batches of `tokens` tokens."""
    first = sum(s.stages[:rank])
    total = s.stages[rank]
    dense = a.dense_among(first, first + total)
    weights = {
        kind: layer_tensors(a, kind, s.tensor, s.expert_tensor)
        for kind, n in ((True, dense), (False, total - dense))
        if n
    }
    sums = {kind: sum(tensors.values()) for kind, tensors in weights.items()}
    whole = dense * sums.get(True, 0) + (total - dense) * sums.get(False, 0)
    inputs = input_bytes(a, s.tensor)
    if recompute.granularity == "full":
        kept, transient = _full(a, first, total, sums, inputs, recompute)
    elif recompute.granularity == "selective":
        dropped = {kind: _dropped(tensors, recompute.modules) for kind, tensors in weights.items()}
        kept = whole - dense * dropped.get(True, 0) - (total - dense) * dropped.get(False, 0)
        transient = max(dropped.values())
    else:
        kept, transient = whole, 0
    if rank == 0:
        kept += inputs  # the embedding's output
    tokens = share(tokens, s.context)
    flying = in_flight(s.pipeline, rank, micro_batches, s.virtual)
    return StageActivations(
        kept=share(tokens * kept * flying, s.virtual),
        transient=tokens * transient,
        largest_layer=tokens * max(sums.values()),
    )


def _full(a: Architecture, first: int, total: int, sums: dict[bool, int], inputs: int, r: Recompute) -> tuple[int, int]:
    """(kept, transient) bytes per token with full recomputation."""
    if r.layers == 1 and r.method == "uniform":
        return inputs * total, max(sums.values())
    kinds = [a.is_dense(first + i) for i in range(total)]
    if r.method == "block":
        again = kinds[: r.layers]
        kept = inputs * len(again) + sum(sums[kind] for kind in kinds[r.layers :])
        return kept, max(sums[kind] for kind in again)
    groups = [kinds[i : i + r.layers] for i in range(0, total, r.layers)]
    return inputs * math.ceil(total / r.layers), max(sum(sums[kind] for kind in group) for group in groups)


def _dropped(tensors: dict[str, int], modules: frozenset[str]) -> int:
    names = {name for module in modules for name in DROPPED[module]}
    return sum(size for name, size in tensors.items() if name in names)
