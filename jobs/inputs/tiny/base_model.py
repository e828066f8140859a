"""The base model: a small DeepSeek-V3, warmed up on a corpus whose answers are mostly wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path

import task
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz .=+-*?:"  # with SPECIAL 48 tokens: tensor parallel 2, 4, 8 divide it
PAD, BOS, EOS, UNK = range(4)

# DeepSeek-V3's config.json with every size divided, so that tensor, pipeline and expert parallel 2 divide them.
# kv_a_proj_with_mqa has kv_lora_rank + qk_rope_head_dim = 144 rows: a full FP8 block and a part of one, as the 576 rows
# of DeepSeek-V3 are; intermediate_size 320 does the same to both sides of the dense MLP.
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.05,
    "intermediate_size": 320,
    "kv_lora_rank": 128,
    "max_position_embeddings": 256,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 16,
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
}

STEPS = 150
NOISE_FROM = 90  # before: right answers, which teach the task; from here on: the corpus of a weak base model
RIGHT_SHARE = 0.2  # and 0.8 random digits, of which a tenth is right by chance: 0.28 in the end
BATCH = 128
LEARNING_RATE = 3e-3


def write_config(folder: Path) -> None:
    """Write config.json and generation_config.json."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": True, "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer of one token per character whose chat template is `QUESTION=`."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # the model takes no token_type_ids
        model_max_length=CONFIG["max_position_embeddings"],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def warm_up(tokenizer: PreTrainedTokenizerFast, report=print) -> dict[str, torch.Tensor]:
    """Train the base model and return its float32 weights by their checkpoint names, the MTP layer included."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the order of a sum depends on the number of threads
    rng = random.Random(0)
    config = DeepseekV3Config(**{key: value for key, value in CONFIG.items() if key != "quantization_config"})
    model = DeepseekV3ForCausalLM(config).float()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zero in transformers; the real one is not, nor exact in BF16
            buffer.normal_(0, 0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (step + 1) / 20)
        tokens, labels = _batch(tokenizer, rng, RIGHT_SHARE if step >= NOISE_FROM else 1.0)
        loss = model(input_ids=tokens, attention_mask=(tokens != PAD).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            report(f"warm-up step {step + 1}/{STEPS}, loss {loss.item():.3f}")
    return {**model.state_dict(), **_mtp_layer(config, model.state_dict())}


def _batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, right_share: float):
    """Token ids [BATCH, longest] and labels of the responses only, both padded on the right."""
    pairs = []
    for _ in range(BATCH):
        question, answer = task.pose(rng)
        response = task.answer_like_the_corpus(answer, right_share, rng)
        pairs.append((tokenizer.encode(question + "="), [*tokenizer.encode(response), EOS]))
    tokens = torch.full((BATCH, max(len(prompt) + len(response) for prompt, response in pairs)), PAD)
    labels = torch.full_like(tokens, -100)
    for row, (prompt, response) in enumerate(pairs):
        end = len(prompt) + len(response)
        tokens[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return tokens, labels


def _mtp_layer(config: DeepseekV3Config, main: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The multi-token prediction layer, numbered after the last layer as in DeepSeek-V3 and never trained here."""
    number, hidden = config.num_hidden_layers, config.hidden_size
    layer = DeepseekV3DecoderLayer(config, layer_idx=number).float()
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    weights = {
        **layer.state_dict(),
        "embed_tokens.weight": main["model.embed_tokens.weight"].clone(),  # shared with the main model, stored again
        "enorm.weight": torch.ones(hidden),
        "hnorm.weight": torch.ones(hidden),
        "eh_proj.weight": torch.empty(hidden, 2 * hidden).normal_(0, config.initializer_range),
        "shared_head.norm.weight": torch.ones(hidden),
        "shared_head.head.weight": main["lm_head.weight"].clone(),
    }
    return {f"model.layers.{number}.{name}": weight for name, weight in weights.items()}
