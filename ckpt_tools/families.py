"""Which tensors, with which shapes, a model's config promises, for the families this project trains.

Source of names and shapes: transformers 4.57 `modeling_{deepseek_v3,qwen2,qwen3,qwen3_moe,llama}.py`; the MTP layer
from DeepSeek-V3's README_WEIGHTS.md. An unknown family promises nothing, and only the generic checks apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

Shapes = Iterator[tuple[str, tuple[int, ...]]]

LAYER = re.compile(r"^(?P<stem>(?:[\w]+\.)*?layers)\.(?P<layer>\d+)\.(?P<rest>.+)$")
EXPERT = re.compile(r"^(?P<stem>.+\.experts)\.(?P<expert>\d+)\.(?P<rest>.+)$")
STALE_BUFFER = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn\.masked_bias$")
"""Buffers that a model computes for itself. Some indexes still list them; no trainer ever yields them."""
SCALE_SUFFIX = "_scale_inv"


def layer_of(name: str) -> int | None:
    """Number of the decoder layer a tensor belongs to, None outside of layers."""
    match = LAYER.match(name)
    return int(match["layer"][:9]) if match else None


def layer_count(config: dict) -> int | None:
    return _count(config, "num_hidden_layers")


def expert_count(config: dict) -> int:
    """Routed experts per MoE layer, 0 for a dense model."""
    return next(
        (n for key in ("n_routed_experts", "num_experts", "num_local_experts") if (n := _count(config, key))), 0
    )


def mtp_layers(config: dict) -> int:
    """Multi-token-prediction layers the config announces; they follow the last decoder layer."""
    return _count(config, "num_nextn_predict_layers") or 0


def is_mtp(name: str, config: dict) -> bool:
    """True for a tensor of a multi-token-prediction layer."""
    layers, layer = layer_count(config), layer_of(name)
    return name.startswith("mtp.") or (layers is not None and layer is not None and layer >= layers)


def is_tied(config: dict) -> bool:
    return config.get("tie_word_embeddings") is True


def _count(config: dict, key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _norms(prefix: str, hidden: int) -> Shapes:
    yield f"{prefix}.input_layernorm.weight", (hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (hidden,)


def _grouped_attention(prefix: str, c: dict, biased: str, normed: bool) -> Shapes:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    groups, head = c.get("num_key_value_heads") or heads, c.get("head_dim") or hidden // heads
    rows = {"q": heads * head, "k": groups * head, "v": groups * head, "o": hidden}
    for letter, count in rows.items():
        yield f"{prefix}.{letter}_proj.weight", (count, heads * head if letter == "o" else hidden)
        if letter in biased:
            yield f"{prefix}.{letter}_proj.bias", (count,)
    if normed:
        yield f"{prefix}.q_norm.weight", (head,)
        yield f"{prefix}.k_norm.weight", (head,)


def _latent_attention(prefix: str, c: dict) -> Shapes:
    hidden, heads, rank, rope = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, value, queries = c["qk_nope_head_dim"], c["v_head_dim"], c.get("q_lora_rank")
    if queries is None:
        yield f"{prefix}.q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield f"{prefix}.q_a_proj.weight", (queries, hidden)
        yield f"{prefix}.q_a_layernorm.weight", (queries,)
        yield f"{prefix}.q_b_proj.weight", (heads * (nope + rope), queries)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{prefix}.o_proj.weight", (hidden, heads * value)
    if c.get("attention_bias"):
        if queries is not None:
            yield f"{prefix}.q_a_proj.bias", (queries,)
        yield f"{prefix}.kv_a_proj_with_mqa.bias", (rank + rope,)
        yield f"{prefix}.o_proj.bias", (hidden,)


def _deepseek_layer(prefix: str, layer: int, c: dict) -> Shapes:
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    yield from _norms(prefix, hidden)
    yield from _latent_attention(f"{prefix}.self_attn", c)
    if layer < c.get("first_k_dense_replace", 0) or layer % (c.get("moe_layer_freq") or 1):
        yield from _mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])
        return
    yield f"{prefix}.mlp.gate.weight", (c["n_routed_experts"], hidden)
    if c.get("topk_method", "noaux_tc") == "noaux_tc":
        yield f"{prefix}.mlp.gate.e_score_correction_bias", (c["n_routed_experts"],)
    for expert in range(c["n_routed_experts"]):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, inner)
    if c.get("n_shared_experts"):
        yield from _mlp(f"{prefix}.mlp.shared_experts", hidden, inner * c["n_shared_experts"])


def _deepseek_mtp(prefix: str, layer: int, c: dict) -> Shapes:
    hidden, vocabulary = c["hidden_size"], c["vocab_size"]
    yield from _deepseek_layer(prefix, layer, c)
    yield f"{prefix}.enorm.weight", (hidden,)
    yield f"{prefix}.hnorm.weight", (hidden,)
    yield f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)
    yield f"{prefix}.embed_tokens.weight", (vocabulary, hidden)
    yield f"{prefix}.shared_head.norm.weight", (hidden,)
    yield f"{prefix}.shared_head.head.weight", (vocabulary, hidden)


def _qwen_moe_layer(prefix: str, layer: int, c: dict) -> Shapes:
    hidden = c["hidden_size"]
    yield from _norms(prefix, hidden)
    yield from _grouped_attention(f"{prefix}.self_attn", c, "qkvo" if c.get("attention_bias") else "", normed=True)
    if layer in (c.get("mlp_only_layers") or []) or (layer + 1) % (c.get("decoder_sparse_step") or 1):
        yield from _mlp(f"{prefix}.mlp", hidden, c["intermediate_size"])
        return
    yield f"{prefix}.mlp.gate.weight", (c["num_experts"], hidden)
    for expert in range(c["num_experts"]):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, c["moe_intermediate_size"])


def _dense_layer(prefix: str, layer: int, c: dict) -> Shapes:
    kind = c["model_type"]
    biased = "qkv" if kind == "qwen2" else "qkvo" if c.get("attention_bias") else ""
    yield from _norms(prefix, c["hidden_size"])
    yield from _grouped_attention(f"{prefix}.self_attn", c, biased, normed=kind == "qwen3")
    yield from _mlp(f"{prefix}.mlp", c["hidden_size"], c["intermediate_size"])


_LAYER_OF_FAMILY: dict[str, Callable[[str, int, dict], Shapes]] = {
    "deepseek_v3": _deepseek_layer,
    "qwen3_moe": _qwen_moe_layer,
    "qwen2": _dense_layer,
    "qwen3": _dense_layer,
    "llama": _dense_layer,
}


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]] | None:
    """All tensors a checkpoint with this config needs, MTP layers included, `lm_head` left out when it is tied.

    Returns None for an unknown family, a model without a causal head, or a config that lacks a needed number.
    """
    build = _LAYER_OF_FAMILY.get(str(config.get("model_type")))
    heads = config.get("architectures")
    causal = isinstance(heads, list) and len(heads) == 1 and str(heads[0]).endswith("ForCausalLM")
    layers = layer_count(config)
    if build is None or not causal or layers is None or layers > 10_000 or expert_count(config) > 10_000:
        return None
    if config["model_type"] == "llama" and config.get("mlp_bias"):
        return None
    try:
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
        if not is_tied(config):
            shapes["lm_head.weight"] = (vocabulary, hidden)
        for layer in range(layers):
            shapes.update(build(f"model.layers.{layer}", layer, config))
        if config["model_type"] == "deepseek_v3":
            for layer in range(layers, layers + mtp_layers(config)):
                shapes.update(_deepseek_mtp(f"model.layers.{layer}", layer, config))
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    return shapes
