"""Memory of one FSDP2 worker of verl, byte by byte where tensors decide, and resident growth of its phases on a CPU.

verl 0.7.0 shards every weight along its first dimension that the number of workers divides, else along the first with
padding (`get_shard_placement_fn`). Master weights, gradients and AdamW moments are float32 shards; the model is the
plain Hugging Face one, so activations are those of its layers with scaled-dot-product attention. Logits and what
scoring and loss make of them follow `dp_actor._forward_micro_batch`, `logprobs_from_logits_v2`, `entropy_from_logits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlasrl.memory.architecture import Architecture, Weight
from atlasrl.memory.parameters import share
from atlasrl.memory.worker import FLOAT, Batch, Expected, Growth, Tensors

if TYPE_CHECKING:
    from atlasrl.recipe import Recipe


def expected(_recipe: Recipe, a: Architecture, b: Batch, world: int, rank: int) -> Expected:
    """What worker `rank` of `world` holds, and how its phases make it grow."""
    growths = {"log_prob": score_growth(a, b), "update": update_growth(a, b, world)}
    return Expected(tensors(a, b, world, rank), growths)


def shard_rows(weight: Weight, world: int, rank: int) -> int:
    """Elements of one copy of a weight on one worker."""
    if any(size % world == 0 for size in weight.shape):
        return weight.size // world
    first = weight.shape[0]
    chunk = share(first, world)
    rows = max(0, min(chunk, first - rank * chunk))
    return rows * (weight.size // first)


def tensors(a: Architecture, b: Batch, world: int, rank: int) -> Tensors:
    """What worker `rank` of `world` holds."""
    trained = [weight for _, weight in a.tensors() if weight.trained]
    elements = sum(shard_rows(weight, world, rank) for weight in trained)
    logit = FLOAT * a.vocabulary
    return Tensors(
        weights=FLOAT * elements,
        buffers=_buffers(a),
        gradients=FLOAT * elements,
        optimizer=2 * FLOAT * elements + FLOAT * len(trained),  # two moments, and a step count for every weight
        update_logits=b.rows * b.tokens * logit,
        score_logits=b.scored_rows * b.tokens * logit,
    )


def _buffers(a: Architecture) -> int:
    """Untrained tensors that every worker holds whole: rotary frequencies and correction biases."""
    rotary = a.latent.rope if a.latent else a.head_width
    biases = sum(weight.size for _, weight in a.tensors() if not weight.trained)
    return FLOAT * (rotary // 2 + biases)


def unit_elements(a: Architecture) -> dict[str, int]:
    """Elements of the FSDP units: the embedding (unless tied), a layer of each kind, and the root with the rest."""
    outer = {weight.name: weight.size for weight in a.outer_weights}
    embedding = outer.pop("model.embed_tokens.weight")
    root = sum(outer.values()) + (embedding if a.tied else 0)
    kinds = {a.is_dense(i) for i in range(a.layers)}
    layers = [sum(w.size * w.copies for w in a.layer_weights(dense) if w.trained) for dense in kinds]
    return {"embedding": 0 if a.tied else embedding, "layer": max(layers), "root": root}


def layer_floats(a: Architecture, dense: bool) -> int:
    """Floats per token that autograd keeps of one Hugging Face layer.

    Per RMSNorm its normalised input and its output; the residual stream twice; for attention the expanded q, k, v, the
    output and its transposed copy; for SwiGLU gate, activation, up and product; for experts also the gathered input and
    the output before its weight.
    """
    floats = 6 * a.hidden
    if m := a.latent:
        floats += 3 * m.q_rank + (m.kv_rank + m.rope) + 2 * m.kv_rank
        floats += a.heads * (2 * m.query + (m.nope + m.value) + 2 * m.value)
    else:
        norm = 2 * a.head_width * (a.heads + a.kv_heads) if a.qk_norm else 0
        floats += norm + a.head_width * (3 * a.heads + 2 * a.kv_heads + a.heads)
    if dense:
        return floats + 4 * a.intermediate
    e = a.experts
    return floats + e.top * (2 * a.hidden + 4 * e.width) + 4 * e.shared_width + 3 * e.count


def activation_bytes(a: Architecture, b: Batch) -> int:
    """What one micro-batch keeps between forward and backward, without logits."""
    tokens = b.rows * b.tokens
    kinds = [a.is_dense(i) for i in range(a.layers)]
    if b.recompute:
        floats = a.layers * a.hidden + max(layer_floats(a, kind) for kind in set(kinds))
    else:
        floats = sum(layer_floats(a, kind) for kind in kinds)
    return FLOAT * tokens * (floats + 3 * a.hidden)  # and the embedding's output, the last norm twice


def live_floats(a: Architecture, dense: bool) -> int:
    """Floats per token alive at the highest moment of a layer without a graph; experts balanced."""
    if m := a.latent:
        attention = a.heads * (3 * m.query + m.nope + 2 * m.value)
    else:
        attention = a.head_width * (2 * a.heads + 3 * a.kv_heads)
    if dense:
        mlp = 3 * a.intermediate
    else:
        e = a.experts
        mlp = a.hidden + max(share(e.top * (2 * a.hidden + 3 * e.width), e.count), 3 * e.shared_width)
    return 2 * a.hidden + max(attention, mlp)


def score_growth(a: Architecture, b: Batch) -> Growth:
    """Forward without a graph: the largest layer, or afterwards logits, softmax and one more of its size (entropy).

    While a layer is gathered, FSDP2 holds it three times: the flat result of the all-gather, the weights copied out of
    it, and the layer before, which is freed when the next one has arrived.
    """
    row = FLOAT * b.scored_rows * a.vocabulary
    entropy = {"logits": row * b.tokens, "softmax": row * b.response, "logsumexp": row * b.response}
    floats = max(live_floats(a, dense) for dense in {a.is_dense(i) for i in range(a.layers)})
    layer = {
        "one layer": FLOAT * b.scored_rows * b.tokens * floats,
        "gathered layers": 3 * FLOAT * unit_elements(a)["layer"],
    }
    return Growth(max(entropy, layer, key=lambda terms: sum(terms.values())) | gathered_root(a))


def gathered_root(a: Architecture) -> dict[str, int]:
    """What a forward leaves gathered: FSDP2 does not reshard the root unit."""
    return {"gathered root": FLOAT * unit_elements(a)["root"]}


def update_growth(a: Architecture, b: Batch, world: int) -> Growth:
    """Forward and backward of one micro-batch while the gradients of those before it are held.

    The root unit is still gathered from scoring (FSDP2 does not reshard it after a forward). The highest of three
    moments counts, all with the activations: logits with their gradient through logsumexp, row by row and once stacked;
    the gradient of all logits before and after the division by the temperature; a unit's whole gradient beside the
    buffer that reduces it.
    """
    units = unit_elements(a)
    row = FLOAT * b.rows * a.vocabulary
    moments = {
        "logits and their gradient": max(row * (b.tokens + 2 * b.response), 2 * row * b.tokens),
        "gradient reduction": FLOAT * (2 * max(units["root"], units["layer"]) + units["layer"]),
    }
    highest = max(moments, key=moments.__getitem__)
    return Growth(
        {
            "activations": activation_bytes(a, b),
            highest: moments[highest],
            "gradients": tensors(a, b, world, 0).gradients,
        }
    )
