"""Memory of one Megatron worker of verl on a CPU: DeepSeek-V3 from megatron-core's torch layers, its experts divided.

Tensors follow megatron-core 0.12.1: parameters and gradients lie in two buffers, one of the routed experts and one of
all others; the distributed optimizer aligns them (`_ParamAndGradBuffer`) and gives each data-parallel rank an equal
piece, whichever parameters it cuts. Activations are those of the layers without Transformer Engine, with the attention
probabilities of every head; of the tiny model autograd was seen to keep 0.4 % more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlasrl.errors import UsageFault
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.parameters import share
from atlasrl.memory.worker import FLOAT, Batch, Expected, Growth, Tensors

if TYPE_CHECKING:
    from atlasrl.recipe import Recipe

ALIGNED, BUCKET = 64, 128  # elements: where a parameter begins, what a buffer's length is a multiple of
LAYER = (  # megatron-core registers an attention's projections in this order, which is that of the buffer
    "input_layernorm",
    "self_attn.o_proj",
    "self_attn.q_proj",
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj",
    "self_attn.q_a_layernorm",
    "self_attn.kv_a_layernorm",
    "post_attention_layernorm",
    "mlp.gate",
)


def expected(recipe: Recipe, a: Architecture, b: Batch, world: int, rank: int) -> Expected:
    """What worker `rank` of `world` holds, and how its phases make it grow.

    Raises:
        UsageFault: the recipe divides more than the experts, or computes in BF16, or the model is of another family.
    """
    p = recipe.parallel
    if (p.tensor, p.pipeline, p.context, p.expert_tensor) != (1, 1, 1, 1):
        raise UsageFault("the workers of a CPU run are predicted for expert parallelism only, not TP, PP, CP or ETP")
    if recipe.model.compute_dtype != "float32" or a.latent is None:
        raise UsageFault("the Megatron workers of a CPU run are predicted for DeepSeek-V3's family in float32 only")
    dense, routed = buffers(a, world, p.expert, p.distributed_optimizer)
    elements = dense.length + routed.length
    logits = FLOAT * b.tokens * a.vocabulary
    tensors = Tensors(
        weights=FLOAT * elements,
        buffers=2 * FLOAT * sum(a.experts.count for i in range(a.layers) if not a.is_dense(i)),  # bias, load
        gradients=FLOAT * elements,
        optimizer=dense.optimizer_bytes(rank) + routed.optimizer_bytes(rank // p.expert),
        update_logits=b.rows * logits,
        score_logits=b.scored_rows * logits,
    )
    return Expected(tensors, {"log_prob": score_growth(a, b), "update": update_growth(a, b, FLOAT * dense.length)})


@dataclass(frozen=True)
class Buffer:
    """Where parameters lie in one of megatron-core's buffers, in elements."""

    places: tuple[tuple[int, int], ...]
    length: int
    replicas: int  # that divide the optimizer's state between them

    def optimizer_bytes(self, replica: int) -> int:
        """Bytes of Adam's state on one replica: two moments of its piece, a step count for each parameter in it."""
        piece = self.length // self.replicas
        begin = replica % self.replicas * piece
        end = begin + piece
        held = [size for first, last in self.places if (size := min(last, end) - max(first, begin)) > 0]
        return FLOAT * (2 * sum(held) + len(held))


def buffers(a: Architecture, world: int, expert: int, distributed: bool) -> tuple[Buffer, Buffer]:
    """The buffers of all but the routed experts, and of the routed experts, on one of `world` ranks."""
    parameters = [*_parameters(a, expert)]
    return tuple(
        _buffer([size for size, routed in parameters if routed is of_experts], replicas, distributed)
        for of_experts, replicas in ((False, world), (True, world // expert))
    )


def _buffer(sizes: list[int], replicas: int, distributed: bool) -> Buffer:
    places, end = [], 0
    for size in reversed(sizes):  # gradients arrive from the last layer on
        begin = share(end, ALIGNED) * ALIGNED if distributed else end
        end = begin + size
        places.append((begin, end))
    if not distributed:  # nothing is aligned, and every replica keeps all of the optimizer's state
        return Buffer(tuple(places), end, 1)
    bucket = math.lcm(replicas, BUCKET)
    return Buffer(tuple(places), share(end, bucket) * bucket, replicas)


def _parameters(a: Architecture, expert: int) -> Iterator[tuple[int, bool]]:
    """(elements, is it a routed expert's?) of every parameter of one rank, in the order of megatron-core's modules."""
    outer = {weight.name: weight.size for weight in a.outer_weights}
    yield outer["model.embed_tokens.weight"], False
    for layer in range(a.layers):
        sizes = {w.name.removesuffix(".weight"): w.size for w in a.layer_weights(a.is_dense(layer))}
        yield from ((sizes[name], False) for name in LAYER if name in sizes)
        if a.is_dense(layer):
            yield from _gated(sizes, "mlp", False)
            continue
        for _ in range(a.experts.count // expert):
            yield from _gated(sizes, "mlp.experts.{expert}", True)
        if a.experts.shared_width:
            yield from _gated(sizes, "mlp.shared_experts", False)
    yield outer["model.norm.weight"], False
    if not a.tied:
        yield outer["lm_head.weight"], False


def _gated(sizes: dict[str, int], prefix: str, routed: bool) -> Iterator[tuple[int, bool]]:
    """Gate and up projection are one parameter here, the down projection another."""
    yield sizes[f"{prefix}.gate_proj"] + sizes[f"{prefix}.up_proj"], routed
    yield sizes[f"{prefix}.down_proj"], routed


def _routed(a: Architecture, b: Batch, rows: int) -> float:
    """Tokens that this worker's experts get for each of its own, in a pass of `rows` rows."""
    return a.experts.top if b.routed is None else b.routed / (rows * b.tokens)


def layer_floats(a: Architecture, b: Batch, dense: bool) -> float:
    """Floats per token that autograd keeps of one layer.

    Per RMSNorm its input, its normalised input and its output; for attention q, k and v with their heads, the
    probabilities and the output; for SwiGLU gate and up as one, the activation and the product. A routed expert keeps
    its gathered input and also the product weighted by the router, who keeps its scores, maps and indices.
    """
    m, e = a.latent, a.experts
    floats = 6 * a.hidden + 3 * m.q_rank + (m.kv_rank + m.rope) + 2 * m.kv_rank
    floats += a.heads * (2 * m.query + 2 * m.value + b.tokens)
    if dense:
        return floats + 4 * a.intermediate
    return floats + _routed(a, b, b.rows) * (a.hidden + 5 * e.width) + 4 * e.shared_width + 3 * e.count + 8 * e.top


def activation_bytes(a: Architecture, b: Batch) -> int:
    """What one micro-batch keeps between forward and backward, without logits."""
    kept = [layer_floats(a, b, a.is_dense(i)) for i in range(a.layers)]
    floats = a.layers * a.hidden + max(kept) if b.recompute else sum(kept)
    return round(FLOAT * b.rows * b.tokens * (floats + 3 * a.hidden))  # and the last norm


def score_growth(a: Architecture, b: Batch) -> Growth:
    """Forward without a graph: the largest layer, or afterwards logits and what the entropy makes of them."""
    logits = FLOAT * b.scored_rows * b.tokens * a.vocabulary
    entropy = {"logits": logits, "copy for the entropy": logits, "softmax": logits, "its product with them": logits}
    floats = max(_live_floats(a, b, dense) for dense in {a.is_dense(i) for i in range(a.layers)})
    layer = {"one layer": round(FLOAT * b.scored_rows * b.tokens * floats)}
    return Growth(max(entropy, layer, key=lambda terms: sum(terms.values())))


def _live_floats(a: Architecture, b: Batch, dense: bool) -> float:
    """Floats per token alive at the highest moment of a layer without a graph.

    Of a mixture: the input and output of this worker's experts, the output put back into the order of its arrival, what
    returns from all workers, and their sum.
    """
    m, e = a.latent, a.experts
    attention = m.kv_rank + m.rope + a.heads * (3 * m.query + m.nope + 2 * m.value + 3 * b.tokens)
    mlp = 4 * a.intermediate if dense else a.hidden * (3 * _routed(a, b, b.scored_rows) + e.top + 1)
    return 2 * a.hidden + max(attention, mlp)


def update_growth(a: Architecture, b: Batch, reduced: int) -> Growth:
    """Forward and backward of one micro-batch; weights, gradients and the optimizer's state are held all the time.

    Highest is the backward of the output layer: with all activations the gradient of the logits, once by row and once
    by position, and the gradient of its weight; or later a copy of the buffer of gradients that is `reduced`, in bytes.
    """
    logits = FLOAT * b.rows * b.tokens * a.vocabulary
    backward = {
        "activations": activation_bytes(a, b),
        "gradient of the logits": 2 * logits,
        "gradient of the output layer": FLOAT * a.vocabulary * a.hidden,
    }
    return Growth(max(backward, {"gradient reduction": reduced}, key=lambda terms: sum(terms.values())))
