"""Published shapes, so that a plan can be made on a machine that does not hold the model.

The numbers are those of each model's public `config.json` on the Hugging Face hub; `find` knows a model by the last
part of its path. A config.json that exists always wins over this list.
"""

from __future__ import annotations

from atlasrl.memory.architecture import Architecture, from_config

_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
_MOONLIGHT = {
    **_DEEPSEEK_V3,
    "vocab_size": 163840,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "num_nextn_predict_layers": 0,
}


def _qwen3_moe(hidden: int, layers: int, heads: int, width: int, intermediate: int) -> dict:
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "moe_intermediate_size": width,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    }


def _qwen2(hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, tied: bool) -> dict:
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "tie_word_embeddings": tied,
    }


CONFIGS = {
    "DeepSeek-V3": _DEEPSEEK_V3,
    "Moonlight-16B-A3B": _MOONLIGHT,
    "Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 768, 6144),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 1536, 12288),
    "Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, 151936, True),
    "Qwen2.5-1.5B": _qwen2(1536, 28, 12, 2, 8960, 151936, True),
    "Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944, 152064, False),
    "Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648, 152064, False),
    "Qwen2.5-72B": _qwen2(8192, 80, 64, 8, 29568, 152064, False),
}
ALIASES = {"DeepSeek-V3-Base": "DeepSeek-V3", "DeepSeek-R1": "DeepSeek-V3", "DeepSeek-V3-0324": "DeepSeek-V3"}
_SUFFIXES = ("-Base", "-Instruct", "-BF16", "-bf16", "-FP8")


def find(name: str) -> Architecture | None:
    """The architecture of a published model, by folder name such as `DeepSeek-V3-BF16`; None when unknown."""
    stem = name
    while stem not in CONFIGS and stem not in ALIASES:
        suffix = next((s for s in _SUFFIXES if stem.endswith(s)), None)
        if suffix is None:
            return None
        stem = stem.removesuffix(suffix)
    return from_config(CONFIGS[ALIASES.get(stem, stem)], name)
