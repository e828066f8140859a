"""Parameters on one rank: of the whole model, of a pipeline stage, of a rollout replica. Whole numbers throughout.

Dense parameters (attention, norms, router, shared expert, embedding) and routed-expert parameters are counted apart,
because their optimizer state is divided over different groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from atlasrl.legality import RolloutSplit, Split
from atlasrl.memory.architecture import Architecture, Weight


class Count(NamedTuple):
    """Parameters of one rank."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: Count) -> Count:
        return Count(self.dense + other.dense, self.expert + other.expert)

    def __mul__(self, times: int) -> Count:
        return Count(self.dense * times, self.expert * times)


@dataclass(frozen=True)
class Placement:
    """What one rank holds of a layer."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    down_split: bool = True  # MLA down-projections over TP: Megatron-core 0.12.1 and 0.13 (TEColumnParallelLinear)
    shared_split: bool = True  # the shared expert over TP


WHOLE = Placement()


def share(amount: int, parts: int) -> int:
    """The largest share of `amount` divided over `parts` ranks; what does not divide is padded."""
    return -(-amount // parts)


def _on_rank(a: Architecture, w: Weight, p: Placement) -> int:
    if w.split == "expert":
        return share(w.copies, p.expert) * share(w.size, p.expert_tensor)
    divisor = {
        "tensor": p.tensor,
        "kv": min(p.tensor, a.kv_heads),
        "down": p.tensor if p.down_split else 1,
        "shared": p.tensor if p.shared_split else 1,
        "replicated": 1,
    }[w.split]
    return share(w.size, divisor) * w.copies


@functools.lru_cache(maxsize=4096)
def layer(a: Architecture, dense: bool, p: Placement) -> Count:
    """Parameters of one layer on one rank, router and correction bias included."""
    counts = [(w.split == "expert", _on_rank(a, w, p)) for w in a.layer_weights(dense)]
    return Count(sum(n for routed, n in counts if not routed), sum(n for routed, n in counts if routed))


def layers(a: Architecture, first: int, end: int, p: Placement) -> Count:
    """Parameters of layers [first, end) on one rank."""
    dense = a.dense_among(first, end)
    mixture = end - first - dense
    total = layer(a, True, p) * dense if dense else Count(0, 0)
    return total + layer(a, False, p) * mixture if mixture else total


def total(a: Architecture) -> int:
    """All parameters of the checkpoint without multi-token prediction, correction bias included."""
    return layers(a, 0, a.layers, WHOLE).total + sum(w.size for w in a.outer_weights)


def routed(a: Architecture) -> int:
    return layers(a, 0, a.layers, WHOLE).expert


def active(a: Architecture, with_embedding: bool = True) -> int:
    """Parameters that one token passes through; the embedding table counts in full or not at all."""
    dense, expert = layers(a, 0, a.layers, WHOLE)
    used = expert * a.experts.top // a.experts.count if a.experts else 0
    outer = {w.name: w.size for w in a.outer_weights}
    if not with_embedding and not a.tied:
        del outer["model.embed_tokens.weight"]
    return dense + used + sum(outer.values())


def draft_module(a: Architecture, with_copies: bool = False) -> int:
    """One multi-token prediction module: a mixture layer, the [h, 2h] projection and three norms.

    `with_copies` adds its own embedding and output layer, which the published checkpoint stores a second time.
    """
    unique = layer(a, False, WHOLE).total + 2 * a.hidden * a.hidden + 3 * a.hidden
    return unique + (2 * a.vocabulary * a.hidden if with_copies else 0)


def placement(s: Split) -> Placement:
    """What a training rank holds (Megatron)."""
    return Placement(s.tensor, s.expert, s.expert_tensor)


def stage(a: Architecture, s: Split, rank: int) -> Count:
    """Parameters on one rank of pipeline stage `rank`: its layers, the embedding (first), norm and head (last)."""
    first = sum(s.stages[:rank])
    count = layers(a, first, first + s.stages[rank], placement(s))
    table = share(a.vocabulary * a.hidden, s.tensor)
    if rank == 0:
        count += Count(table, 0)
    if rank == s.pipeline - 1:
        shared_here = a.tied and s.pipeline == 1  # with PP > 1 a tied head is a second copy on the last stage
        count += Count(a.hidden + (0 if shared_here else table), 0)
    return count


def rollout(a: Architecture, r: RolloutSplit) -> Count:
    """Parameters on one vLLM rank: down-projections replicated; whole experts over EP, or without EP each over TP."""
    routed_split = (r.expert, 1) if r.expert > 1 else (1, r.tensor)
    p = Placement(r.tensor, *routed_split, down_split=False)
    outer = sum(_on_rank(a, w, p) for w in a.outer_weights)
    return layers(a, 0, a.layers, p) + Count(outer, 0)


def absorbed_copies(a: Architecture, r: RolloutSplit) -> int:
    """W_UK_T and W_UV that vLLM-Ascend keeps beside kv_b_proj for absorbed attention, on one rank."""
    m = a.latent
    return share(a.layers * m.kv_rank * a.heads * (m.nope + m.value), r.tensor) if m else 0


def cache_bytes_per_token(a: Architecture, tensor: int = 1, itemsize: int = 2) -> int:
    """KV cache of one token on one rank. The MLA latent is not divided by TP; KV heads are, down to one."""
    if a.latent:
        return a.layers * itemsize * (a.latent.kv_rank + a.latent.rope)
    return a.layers * itemsize * 2 * share(a.kv_heads, tensor) * a.head_width
