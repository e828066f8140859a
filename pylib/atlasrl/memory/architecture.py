"""The shape of a model, read from its `config.json`: every weight with its name, shape and way of splitting.

Families: DeepSeek-V3 (also Moonlight, which uses the same model type), Qwen3-MoE, Qwen3 and Qwen2/2.5. The names and
shapes are those of `transformers`; the tests compare them with its meta-device models. No torch here.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atlasrl.errors import Fault, UsageFault

FAMILIES = ("deepseek_v3", "qwen3_moe", "qwen3", "qwen2")

Split = Literal[
    "tensor",  # divided by TP
    "kv",  # divided by min(TP, KV heads): fewer KV heads than ranks are replicated
    "down",  # MLA down-projections: divided by TP in Megatron-core 0.12.1, replicated in vLLM
    "shared",  # the shared expert: divided by TP in Megatron, whole in the article's reading
    "expert",  # routed experts: whole ones over EP, each over ETP
    "replicated",
]


@dataclass(frozen=True)
class Weight:
    """One kind of tensor; `name` holds {layer} and {expert} where it is repeated."""

    name: str
    shape: tuple[int, ...]
    split: Split
    copies: int = 1  # experts of one layer
    trained: bool = True  # False: a buffer that is stored but gets no gradient

    @property
    def size(self) -> int:
        """Elements of one copy."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_rank: int  # 0: queries are not compressed (Moonlight)
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def query(self) -> int:
        return self.nope + self.rope


@dataclass(frozen=True)
class Experts:
    count: int
    top: int  # experts a token is sent to
    width: int  # intermediate size of one routed expert
    shared_width: int  # of all shared experts together; 0: none
    correction_bias: bool  # e_score_correction_bias, one per expert


@dataclass(frozen=True, eq=False)
class Architecture:
    """Compared and hashed by identity, so that it is a cheap key of the caches; read it once."""

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    tied: bool
    latent: Latent | None = None
    experts: Experts | None = None
    dense_layers: frozenset[int] = frozenset()  # layers whose MLP is not a mixture
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    draft_layers: int = 0  # multi-token prediction modules in the checkpoint; not trained here

    def is_dense(self, layer: int) -> bool:
        return layer in self.dense_layers

    @functools.cached_property
    def dense_prefix(self) -> tuple[int, ...]:
        """dense_prefix[i]: how many of the first i layers are dense."""
        counts = [0]
        for layer in range(self.layers):
            counts.append(counts[-1] + self.is_dense(layer))
        return tuple(counts)

    def dense_among(self, first: int, end: int) -> int:
        """Dense layers in [first, end)."""
        return self.dense_prefix[end] - self.dense_prefix[first]

    @functools.cached_property
    def attention_weights(self) -> tuple[Weight, ...]:
        return tuple(_latent_attention(self) if self.latent else _grouped_attention(self))

    @functools.cached_property
    def mlp_weights(self) -> tuple[Weight, ...]:
        return tuple(_gated(self.hidden, self.intermediate, "mlp", "tensor"))

    @functools.cached_property
    def mixture_weights(self) -> tuple[Weight, ...]:
        if self.experts is None:
            return ()
        e = self.experts
        weights = [Weight("mlp.gate.weight", (e.count, self.hidden), "replicated")]
        if e.correction_bias:
            weights.append(Weight("mlp.gate.e_score_correction_bias", (e.count,), "replicated", trained=False))
        weights += _gated(self.hidden, e.width, "mlp.experts.{expert}", "expert", e.count)
        if e.shared_width:
            weights += _gated(self.hidden, e.shared_width, "mlp.shared_experts", "shared")
        return tuple(weights)

    def layer_weights(self, dense: bool) -> tuple[Weight, ...]:
        norms = (
            Weight("input_layernorm.weight", (self.hidden,), "replicated"),
            Weight("post_attention_layernorm.weight", (self.hidden,), "replicated"),
        )
        return self.attention_weights + (self.mlp_weights if dense else self.mixture_weights) + norms

    @functools.cached_property
    def outer_weights(self) -> tuple[Weight, ...]:
        """Embedding, final norm and, unless it is the embedding itself, the output layer."""
        table = (self.vocabulary, self.hidden)
        head = () if self.tied else (Weight("lm_head.weight", table, "tensor"),)
        return (
            Weight("model.embed_tokens.weight", table, "tensor"),
            Weight("model.norm.weight", (self.hidden,), "replicated"),
            *head,
        )

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """Every tensor of the checkpoint with its full name, without multi-token prediction."""
        for weight in self.outer_weights:
            yield weight.name, weight
        for layer in range(self.layers):
            for weight in self.layer_weights(self.is_dense(layer)):
                for expert in range(weight.copies):
                    yield f"model.layers.{layer}.{weight.name.format(expert=expert)}", weight


def _latent_attention(a: Architecture) -> Iterator[Weight]:
    m, h = a.latent, a.hidden
    if m.q_rank:
        yield Weight("self_attn.q_a_proj.weight", (m.q_rank, h), "down")
        yield Weight("self_attn.q_a_layernorm.weight", (m.q_rank,), "replicated")
        yield Weight("self_attn.q_b_proj.weight", (a.heads * m.query, m.q_rank), "tensor")
    else:
        yield Weight("self_attn.q_proj.weight", (a.heads * m.query, h), "tensor")
    yield Weight("self_attn.kv_a_proj_with_mqa.weight", (m.kv_rank + m.rope, h), "down")
    yield Weight("self_attn.kv_a_layernorm.weight", (m.kv_rank,), "replicated")
    yield Weight("self_attn.kv_b_proj.weight", (a.heads * (m.nope + m.value), m.kv_rank), "tensor")
    yield Weight("self_attn.o_proj.weight", (h, a.heads * m.value), "tensor")
    if a.qkv_bias:
        if m.q_rank:
            yield Weight("self_attn.q_a_proj.bias", (m.q_rank,), "down")
        yield Weight("self_attn.kv_a_proj_with_mqa.bias", (m.kv_rank + m.rope,), "down")
    if a.output_bias:
        yield Weight("self_attn.o_proj.bias", (h,), "replicated")


def _grouped_attention(a: Architecture) -> Iterator[Weight]:
    queries, keys = a.heads * a.head_width, a.kv_heads * a.head_width
    for name, rows, split in (("q", queries, "tensor"), ("k", keys, "kv"), ("v", keys, "kv")):
        yield Weight(f"self_attn.{name}_proj.weight", (rows, a.hidden), split)
        if a.qkv_bias:
            yield Weight(f"self_attn.{name}_proj.bias", (rows,), split)
    yield Weight("self_attn.o_proj.weight", (a.hidden, queries), "tensor")
    if a.output_bias:
        yield Weight("self_attn.o_proj.bias", (a.hidden,), "replicated")
    if a.qk_norm:
        yield Weight("self_attn.q_norm.weight", (a.head_width,), "replicated")
        yield Weight("self_attn.k_norm.weight", (a.head_width,), "replicated")


def _gated(hidden: int, width: int, prefix: str, split: Split, copies: int = 1) -> Iterator[Weight]:
    """gate, up and down projections of a SwiGLU block."""
    for name in ("gate_proj", "up_proj"):
        yield Weight(f"{prefix}.{name}.weight", (width, hidden), split, copies)
    yield Weight(f"{prefix}.down_proj.weight", (hidden, width), split, copies)


def from_config(config: dict, origin: str = "config.json") -> Architecture:
    """Read a Hugging Face configuration.

    Raises:
        UsageFault: the model type is not one of `FAMILIES`.
        Fault: a key that the family needs is missing.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UsageFault(f"{origin}: the memory model knows {', '.join(FAMILIES)}, not model_type {family!r}")
    try:
        a = (_deepseek if family == "deepseek_v3" else _qwen)(config)
        _check_sizes(a)
        return a
    except (TypeError, ValueError) as problem:
        raise Fault(f"{origin}: {problem}; copy config.json again from the model's repository") from None
    except KeyError as missing:
        raise Fault(f"{origin}: {family} needs the key {missing}; the file is incomplete") from None


def _check_sizes(a: Architecture) -> None:
    """Raise ValueError when a size is no positive whole number."""
    sizes = {name: getattr(a, name) for name in ("vocabulary", "hidden", "layers", "heads", "kv_heads", "head_width")}
    sizes["intermediate"] = a.intermediate
    if a.experts:
        sizes |= {"experts": a.experts.count, "experts per token": a.experts.top, "expert width": a.experts.width}
    if m := a.latent:
        sizes |= {"kv_lora_rank": m.kv_rank, "qk_nope": m.nope, "qk_rope": m.rope, "v_head_dim": m.value}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} is {size!r}, not a positive whole number")


def read(model: Path) -> Architecture:
    """Read the architecture of a checkpoint folder, or of a configuration file.

    Raises:
        UsageFault: there is no configuration.
        Fault: it is not JSON, or incomplete.
    """
    file = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(file.read_text())
    except OSError:
        raise UsageFault(f"{file} cannot be read; name the model folder or its config.json") from None
    except ValueError:
        raise Fault(f"{file} is not JSON; copy config.json again from the model's repository") from None
    if not isinstance(config, dict):
        raise Fault(f"{file} holds no JSON object; copy config.json again from the model's repository")
    return from_config(config, str(file))


def _common(c: dict) -> dict:
    return {
        "family": c["model_type"],
        "vocabulary": c["vocab_size"],
        "hidden": c["hidden_size"],
        "layers": c["num_hidden_layers"],
        "heads": c["num_attention_heads"],
        "intermediate": c["intermediate_size"],
        "tied": bool(c.get("tie_word_embeddings", False)),
    }


def _deepseek(c: dict) -> Architecture:
    mixture = bool(c.get("n_routed_experts"))
    first_mixture = c["first_k_dense_replace"] if mixture else c["num_hidden_layers"]
    bias = bool(c.get("attention_bias", False))
    return Architecture(
        **_common(c),
        kv_heads=c["num_attention_heads"],
        head_width=c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        latent=Latent(
            q_rank=c.get("q_lora_rank") or 0,
            kv_rank=c["kv_lora_rank"],
            nope=c["qk_nope_head_dim"],
            rope=c["qk_rope_head_dim"],
            value=c["v_head_dim"],
        ),
        experts=Experts(
            count=c["n_routed_experts"],
            top=c["num_experts_per_tok"],
            width=c["moe_intermediate_size"],
            shared_width=c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0),
            correction_bias=c.get("topk_method", "noaux_tc") == "noaux_tc",
        )
        if mixture
        else None,
        dense_layers=frozenset(range(min(first_mixture, c["num_hidden_layers"]))),
        qkv_bias=bias,
        output_bias=bias,
        draft_layers=c.get("num_nextn_predict_layers") or 0,
    )


def _qwen(c: dict) -> Architecture:
    family, layers = c["model_type"], c["num_hidden_layers"]
    bias = family == "qwen2" or bool(c.get("attention_bias", False))
    mixture = family == "qwen3_moe" and bool(c.get("num_experts"))
    step, dense_only = c.get("decoder_sparse_step", 1), set(c.get("mlp_only_layers") or ())
    dense = {i for i in range(layers) if not mixture or i in dense_only or (i + 1) % step}
    return Architecture(
        **_common(c),
        kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
        head_width=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        experts=Experts(
            count=c["num_experts"],
            top=c["num_experts_per_tok"],
            width=c["moe_intermediate_size"],
            shared_width=0,
            correction_bias=False,
        )
        if mixture
        else None,
        dense_layers=frozenset(dense),
        qkv_bias=bias,
        output_bias=family != "qwen2" and bias,
        qk_norm=family.startswith("qwen3"),
    )
