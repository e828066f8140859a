"""A tiny random DeepSeek-V3 checkpoint with everything that makes the real one difficult.

Latent attention with yarn scaling, a dense first layer, experts chosen within groups, a shared expert, router biases
that are not zero, several shards with an index. Made in a second, deterministic for a seed.
"""

from __future__ import annotations

import json
from pathlib import Path

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 1280,  # 40 times the original: what yarn was made for
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.06,
}
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")


def make(folder: Path, seed: int = 1, sizes: dict | None = None, shard_size: str = "200KB") -> Path:
    """Write a random float32 DeepSeek-V3 checkpoint with a tokenizer of single characters to `folder`."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV3Config(**{**SIZES, **(sizes or {})})
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        # transformers starts the padding row at zero; sampled as a token, its norm has a gradient of 1000
        model.get_input_embeddings().weight[config.pad_token_id].normal_(std=config.initializer_range)
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn_like(tensor) * 0.05)
            elif tensor.ndim == 1:
                tensor.copy_(1 + torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder, safe_serialization=True, max_shard_size=shard_size)
    _write_tokenizer(folder, config.vocab_size)
    return folder


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(33, 33 + vocab_size - len(SPECIAL_TOKENS))]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


def config_of(folder: Path) -> dict:
    """The checkpoint's config.json."""
    return json.loads((Path(folder) / "config.json").read_text())
