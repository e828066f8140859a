"""Axis 5: does the running attention scale its logits as the checkpoint's config.json says?

The value expected comes from the configuration alone; the value found from what the running attention does to vectors
whose products are known. A wrong value is explained by the known mistake that gives it: MindSpeed before a25e413e
(!2976) took 1/sqrt(kv_channels) whatever softmax_scale said, 22.5 % off for Moonlight and 7.6 % for DeepSeek-V3.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from atlasrl.errors import Fault

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative, of a measured scale. The wrong scales seen in the wild are off by 1.2 % to 22 %."""

PROBES = 64

KNOWN = ("deepseek_v2", "deepseek_v3", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types whose scale is what `expected_scale` says; others may carry a multiplier of their own."""


@dataclass(frozen=True)
class Scale:
    """A softmax scale and where it comes from."""

    value: float
    reason: str

    def __str__(self) -> str:
        return f"{self.value:.6f} = {self.reason}"


@dataclass(frozen=True)
class Verdict:
    """One attention module, measured."""

    module: str
    expected: Scale
    found: float
    tolerance: float
    cause: str | None = None
    """the known mistake that gives `found`"""

    @property
    def ok(self) -> bool:
        return abs(self.found - self.expected.value) <= self.tolerance * self.expected.value

    def __str__(self) -> str:
        if self.ok:
            return f"{self.module}: {self.found:.6f}, as config.json says"
        off = self.found / self.expected.value - 1
        told = f"{self.module}: {self.found:.6f}, config.json says {self.expected} ({off:+.1%})"
        return f"{told}; the value found is {self.cause}" if self.cause else told


def expected_scale(config: Mapping) -> Scale:
    """The scale that a model of this config.json was trained with.

    Latent attention multiplies 1/sqrt(nope + rope) by the square of yarn's factor, 0.1 · mscale_all_dim · ln(factor) +
    1; other models put it into the rotary embedding. Source: DeepSeek-V3 inference/model.py, transformers 4.57.
    """
    size = _head_size(config)
    if not (magnitude := _yarn_factor(config)):
        return Scale(size**-0.5, f"1/sqrt({size})")
    words = f"1/sqrt({size}) · {magnitude:.6f}² (yarn)"
    return Scale(size**-0.5 * magnitude**2, words)


def mistakes(config: Mapping) -> Iterator[Scale]:
    """Scales that wrong code gives for this config.json."""
    heads = config["num_attention_heads"]
    sizes = {
        "head_dim, which mbridge passes on as kv_channels": config.get("head_dim"),
        "hidden size / heads, Megatron's default for kv_channels": config["hidden_size"] // heads,
        "the part of the head without rotary embedding": config.get("qk_nope_head_dim"),
        "the rotary part of the head": config.get("qk_rope_head_dim"),
        "the size of the value head": config.get("v_head_dim"),
        "the whole head, without yarn's factor": _head_size(config),
    }
    magnitude = _yarn_factor(config)
    for what, size in sizes.items():
        if size:
            yield Scale(size**-0.5, f"1/sqrt({size}): {what}")
    if magnitude:
        yield Scale(_head_size(config) ** -0.5 * magnitude, "yarn's factor once instead of squared")
        for what, size in list(sizes.items())[:-1]:
            if size:
                yield Scale(size**-0.5 * magnitude**2, f"1/sqrt({size}) with yarn's factor: {what}")
    yield Scale(1.0, "no scale at all")


def explain(found: float, config: Mapping, tolerance: float) -> str | None:
    """The mistake that gives `found`; None if none does."""
    near = [scale for scale in mistakes(config) if abs(scale.value - found) <= tolerance * found]
    if not near:
        return None
    nearest = min(near, key=lambda scale: abs(scale.value - found)).value
    return f"{nearest:.6f} = {' or '.join(scale.reason for scale in near if scale.value == nearest)}"


def judge(module: str, found: float, config: Mapping, dtype: str) -> Verdict:
    """Hold a measured scale against config.json."""
    expected, tolerance = expected_scale(config), TOLERANCE[dtype]
    verdict = Verdict(module, expected, found, tolerance)
    if verdict.ok:
        return verdict
    return Verdict(module, expected, found, tolerance, explain(found, config, tolerance))


def config_of(folder: Path) -> dict:
    """config.json of a checkpoint.

    Raises:
        Fault: there is none, or it lacks the shape of an attention.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as problem:
        raise Fault(f"{folder}/config.json cannot be read: {problem}; give the folder of a checkpoint") from None
    if missing := {"hidden_size", "num_attention_heads"} - config.keys():
        raise Fault(f"{folder}/config.json lacks {', '.join(sorted(missing))}; is it the configuration of a decoder?")
    return config


def measured_layer(folder: Path, config: Mapping) -> Verdict:
    """The attention of one layer, built by transformers with random weights; the size of the model does not matter.

    Raises:
        Fault: transformers has no rule for this type of model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.get("model_type") not in KNOWN:
        raise Fault(f"{config.get('model_type')} models are not measured; known are {', '.join(KNOWN)}")
    one = AutoConfig.from_pretrained(folder)
    few = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": 8, "n_routed_experts": 1, "num_experts": 1}
    few |= {"intermediate_size": 8, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "pad_token_id": None}
    for name in few:
        if hasattr(one, name):
            setattr(one, name, few[name])
    one.layer_types = (getattr(one, "layer_types", None) or [])[:1] or None
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(one, dtype=torch.float32, attn_implementation="sdpa")
    [verdict] = check(model, config)
    return verdict


def check(model, config: Mapping) -> list[Verdict]:
    """Measure every attention of a running transformers model; none of a type whose rule is not known."""
    if config.get("model_type") not in KNOWN:
        return []
    verdicts = []
    for name, module in model.named_modules():
        if hasattr(module, "scaling") and hasattr(module, "o_proj"):
            dtype = module.o_proj.weight.dtype
            verdicts.append(judge(name, measure(module), config, str(dtype).removeprefix("torch.")))
    return verdicts


def measure(attention) -> float:
    """The scale that a transformers attention module applies, through the kernel that it calls.

    A query meets two keys whose products with it are 0 and -d; with values 0 and 1 the output is p = sigmoid(-scale d),
    so scale = -logit(p) / d. Averaged over many d, and p is small, which evens out half precision.
    """
    import sys

    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config, weight = attention.config, attention.o_proj.weight
    name = config._attn_implementation
    eager = sys.modules[type(attention).__module__].eager_attention_forward
    attend = eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    size, groups = _head_size(config.to_dict()), getattr(attention, "num_key_value_groups", 1)
    query = torch.zeros(PROBES, groups, 1, size)
    key, value = torch.zeros(PROBES, 1, 2, size), torch.zeros(PROBES, 1, 2, size)
    query[..., 0] = 1.0
    key[:, 0, 1, 0] = -torch.linspace(0.5, 2.0, PROBES) * size**0.5
    value[:, :, 1] = 1.0
    query, key, value = (tensor.to(weight.device, weight.dtype) for tensor in (query, key, value))
    with torch.no_grad():
        output, _ = attend(attention, query, key, value, None, dropout=0.0, scaling=attention.scaling)
    share = output.reshape(PROBES, -1).double().cpu().mean(1)
    return (torch.logit(share) / key[:, 0, 1, 0].double().cpu()).mean().item()


def mindspeed_scale(config: Mapping, source: Path) -> Scale | None:
    """What MindSpeed's sources apply to latent attention; None when they apply softmax_scale.

    Args:
        source: folder that holds mindspeed/.

    Raises:
        Fault: no MindSpeed there.
    """
    from atlasrl.doctor.traps import ATTENTION, WRONG_SCALE

    files = [source / file for file in ATTENTION if (source / file).is_file()]
    if not files:
        raise Fault(f"{source} holds no mindspeed/core; give the folder of a MindSpeed checkout or of site-packages")
    texts = [file.read_text() for file in files]
    if not any("npu_fusion_attention" in text and re.search(WRONG_SCALE, text) for text in texts):
        return None
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Scale(size**-0.5, f"1/sqrt({size}), kv_channels: MindSpeed before a25e413e ignores softmax_scale")


def _head_size(config: Mapping) -> int:
    if nope := config.get("qk_nope_head_dim"):
        return nope + config["qk_rope_head_dim"]
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _yarn_factor(config: Mapping) -> float | None:
    """What latent attention multiplies its scale by, twice; None without yarn."""
    rope = config.get("rope_scaling") or {}
    factor, mscale = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0.0)
    if not config.get("qk_nope_head_dim") or factor <= 1 or not mscale:
        return None
    return 0.1 * mscale * math.log(factor) + 1.0
