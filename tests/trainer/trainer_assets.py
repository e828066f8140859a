"""A DeepSeek-V3 of a few thousand parameters, a character tokenizer, prompts and a rule: made in about a second.

The model is untrained and the rule looks at one token only, so that answers of one group differ from the first step.
"""

from __future__ import annotations

import json
from pathlib import Path

ALPHABET = "0123456789+=#"
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Right when the answer's first character is even."""
    right = solution_str[:1] in {"0", "2", "4", "6", "8", "+", "#"}
    return {"score": 1.0 if right else -1.0, "acc": float(right)}
'''


def make_assets(folder: Path, *, prompts: int = 24, experts: int = 4) -> dict[str, Path]:
    """Write model/, train.parquet, val.parquet and reward.py below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: folder / name for name in ("model", "train.parquet", "val.parquet", "reward.py")}
    _tokenizer().save_pretrained(made["model"])
    untrained_model(experts).save_pretrained(made["model"], safe_serialization=True)
    _rows(prompts, "train").to_parquet(made["train.parquet"])
    _rows(6, "val").to_parquet(made["val.parquet"])
    made["reward.py"].write_text(REWARD)
    return made


def recipe_tree(assets: dict[str, Path], **changes) -> dict:
    """A recipe as plain data; `changes` are dotted keys with `__` for the dot."""
    tree = {
        "device": "cpu",
        "backend": "fsdp2",
        "nodes": 1,
        "devices_per_node": 1,
        "steps": 2,
        "seed": 7,
        "model": {"path": str(assets["model"]), "compute_dtype": "float32"},
        "data": {
            "train": str(assets["train.parquet"]),
            "reward": str(assets["reward.py"]),
            "max_prompt_tokens": 8,
            "max_response_tokens": 6,
        },
        "rollout": {"engine": "cpu", "samples": 4},
        "dapo": {
            "train_batch_size": 4,
            "mini_batch_size": 4,
            "micro_batch_size": 8,
            "overlong": {"buffer_tokens": 3, "penalty": 0.5},
        },
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "checkpoint": {"save_every": 1, "keep": 2},
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        section = tree
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return tree


def write_plan(run_path: Path, tree: dict, assets: dict[str, Path], *, validate: bool = False):
    """The part of plan.json that the trainer reads, as the submitting side writes it. Returns the RunDir."""
    from dataclasses import asdict

    from atlasrl import recipe as recipes
    from atlasrl.rundir import RunDir
    from atlasrl.trainer.overrides import verl_overrides

    run = RunDir(run_path)
    run.path.mkdir(parents=True, exist_ok=True)
    recipe = recipes.parse(tree, "test")
    shape = {"nodes": recipe.nodes, "devices_per_node": recipe.devices_per_node}
    paths = {
        "model": str(assets["model"]),
        "train": str(assets["train.parquet"]),
        "val": str(assets["val.parquet"]) if validate else None,
    }
    overrides = verl_overrides(recipe, **shape, **paths, run=run)
    plan = {
        "recipe": recipe.model_dump(mode="json"),
        "run": str(run.path),
        "environment": {"OMP_NUM_THREADS": "1", **(deterministic_variables() if recipe.deterministic else {})},
        "overrides": [asdict(override) for override in overrides],
        **shape,
        **paths,
    }
    run.plan.write_text(json.dumps(plan))
    return run


def deterministic_variables() -> dict[str, str]:
    from atlasrl import determinism

    return {name: value for name, (value, _) in determinism.environment("cpu").items()}


def _tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    return fast


def untrained_model(experts: int):
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=4 + len(ALPHABET),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=experts,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        max_position_embeddings=64,
        rope_scaling=None,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
        num_nextn_predict_layers=0,
    )
    return DeepseekV3ForCausalLM(config)


def _rows(count: int, split: str):
    import pandas

    return pandas.DataFrame(
        {
            "data_source": "parity",
            "prompt": [{"role": "user", "content": f"{i:03d}"[-3:]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i % 10)},
            "extra_info": {"split": split, "index": i},
        }
        for i in range(count)
    )
