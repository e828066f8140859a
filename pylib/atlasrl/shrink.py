"""A rehearsal: any Megatron recipe made so small that a CPU runs a few steps of it, through the same code and keys.

The rule, in the order of the recipe:

    cluster    device cpu, 2 nodes when the recipe has several; as many devices as the split needs, at most 4 in all
    split      tensor, pipeline, expert: 2 where the recipe has more than 1, else 1; expert_tensor likewise unless
               expert is 2; data-parallel 2 when the recipe has replicas and room is left. Recompute and
               optimizer settings stay.
    stages     uneven first and last stages stay uneven: 3 layers and 2, or 2 and 3, in the recipe's direction
    model      same family, random weights: hidden 64, 4 heads, 16 experts in 4 groups (or 8 without groups), one dense
               layer before the experts, the yarn scaling of config.json
    batch      8 prompts × 4 answers of at most 12 tokens, the same number of optimizer steps per batch (at most 2)
    run        3 steps, a checkpoint after the second

Keys that a CPU cannot honour are listed with the reason in shrunk.json beside the recipe.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from atlasrl import recipe as recipes
from atlasrl.errors import Fault, UsageFault
from atlasrl.recipe import Recipe
from atlasrl.rundir import write_atomically
from atlasrl.selftest import model as selftest_model

LAYERS_PER_STAGE = 2
UNEVEN = 3
PROMPT, ANSWER = 8, 12
PROMPTS, SAMPLES = 8, 4
MOST_WORKERS = 4
SHRUNK = "shrunk.json"

NOT_ON_A_CPU = (
    (r"rollout\.(engine_kwargs|cudagraph|enforce_eager|enable_chunked|enable_prefix|max_num|gpu_memory)", "vLLM's own"),
    (r"rollout\.(tensor_model|data|expert|pipeline_model)_parallel_size", "the CPU engine holds the whole model"),
    (
        r"override_transformer_config\.(use_flash|attention_backend|.*fus|moe_grouped|moe_enable_deepep|swap)",
        "a kernel",
    ),
    (r"override_optimizer_config\.(use_precision_aware|overlap_cpu)", "Transformer Engine's or Apex's optimizer"),
    (r"use_remove_padding|use_fused_kernels|use_dynamic_moe", "packing needs a fused attention kernel"),
    (r"(max_model_len|max_prompt_length|max_response_length|max_token_len_per_gpu|batch_size|nnodes|n_gpus)", "a size"),
    (r"profiler", "the profiler reads an accelerator"),
)
"""`verl:` keys that are left out: pattern, reason."""

REWARD = '''"""Right or wrong by the parity of the answer's characters: a coin that every policy can learn to load."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(map(ord, solution_str)) % 2 == int(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right}
'''


@dataclass(frozen=True)
class Rehearsal:
    """A small recipe and what it was made from."""

    recipe: Recipe
    changes: list[dict]
    """Keys that a CPU cannot honour: key, from, to, reason."""
    sizes: dict
    """Sizes of the random model."""

    def write(self, folder: Path) -> None:
        """Make what `recipe` reads, and recipe.yaml and shrunk.json, in the folder it was planned for."""
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / "model"
        if not (model / "config.json").exists():
            selftest_model.make(model, seed=self.recipe.seed, sizes=self.sizes)
        write_atomically(folder / "reward.py", REWARD)
        _write_prompts(folder / "train.parquet")
        tree = self.recipe.model_dump(mode="json", exclude={"inputs"})
        write_atomically(folder / "recipe.yaml", yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        write_atomically(folder / SHRUNK, json.dumps(self.changes, indent=1) + "\n")


def rehearse(recipe: Recipe, folder: Path) -> Rehearsal:
    """Shrink `recipe`; its inputs will lie in `folder`. Nothing is written yet.

    Raises:
        UsageFault: the recipe is not for Megatron, or its model family cannot be rehearsed.
    """
    if recipe.backend != "megatron":
        raise UsageFault(
            f"backend {recipe.backend}: only Megatron recipes are rehearsed; run the recipe `tiny` instead"
        )
    changes: list[dict] = []
    tree = recipe.model_dump(mode="json", exclude={"inputs"})
    _cluster(tree, recipe, changes)
    stages = _stages(tree, recipe)
    _batch(tree, recipe)
    _inputs(tree, folder)
    _pass_through(tree, recipe, changes)
    sizes = _sizes(recipe, sum(stages), changes)
    return Rehearsal(recipes.parse(tree, f"shrunk {recipe.description or 'recipe'}"), changes, sizes)


def _cluster(tree: dict, recipe: Recipe, changes: list[dict]) -> None:
    split, given = tree["parallel"], recipe.parallel
    for name in ("tensor", "pipeline", "expert", "expert_tensor"):
        split[name] = min(2, split[name])
    if split["tensor"] > 1 and split["expert"] == 1:
        reason = "whole experts beside tensor parallelism need Transformer Engine's grouped experts"
        _change(changes, split, "parallel", "expert_tensor", 2, reason)
    if split["expert"] > 1:
        _change(changes, split, "parallel", "expert_tensor", 1, "4 workers cannot split experts both ways")
    _change(changes, split, "parallel", "context", 1, "context parallelism needs Transformer Engine's attention")
    _change(changes, split, "parallel", "virtual_pipeline", 1, "the interleaved schedule is not proven on a CPU")
    _change(changes, split, "parallel", "optimizer_on_host", 0.0, "on a CPU the whole optimizer is on the host")
    _change(changes, split, "parallel", "offload", False, "device and host are the same memory")
    model_size = split["tensor"] * split["pipeline"]
    world = recipe.nodes * recipe.devices_per_node
    replicas = world // (given.tensor * given.pipeline * given.context)
    smallest = split["expert"] * split["expert_tensor"] * split["pipeline"]  # workers that hold all experts once
    workers = max(model_size, smallest) * (2 if replicas > 1 else 1)
    while workers > MOST_WORKERS:
        workers //= 2
    nodes = 2 if recipe.nodes > 1 and workers > 1 else 1
    tree.update(device="cpu", nodes=nodes, devices_per_node=workers // nodes)
    tree["rollout"].update(engine="cpu")
    for name in ("tensor", "expert"):
        _change(changes, tree["rollout"], "rollout", name, 1, "the CPU engine holds the whole model in every worker")
    _change(changes, tree["model"], "model", "compute_dtype", "float32", "numbers stay comparable between layouts")


def _stages(tree: dict, recipe: Recipe) -> list[int]:
    """Layers of each pipeline stage of the small model."""
    split, given = tree["parallel"], recipe.parallel
    if split["pipeline"] == 1:
        split.update(first_stage_layers=None, last_stage_layers=None)
        return [LAYERS_PER_STAGE * 2]
    first, last = given.first_stage_layers, given.last_stage_layers
    if first is None and last is None:
        return [LAYERS_PER_STAGE] * split["pipeline"]
    longer_first = (first or 0) >= (last or 0)
    stages = [UNEVEN, LAYERS_PER_STAGE] if longer_first else [LAYERS_PER_STAGE, UNEVEN]
    # of two stages megatron-core takes one length: given both, it divides what is left by no stages
    split.update(first_stage_layers=stages[0], last_stage_layers=None)
    return stages


def _batch(tree: dict, recipe: Recipe) -> None:
    dapo = recipe.dapo
    steps_per_batch = min(2, max(1, dapo.train_batch_size // dapo.mini_batch_size))
    tree["data"].update(max_prompt_tokens=PROMPT, max_response_tokens=ANSWER)
    tree["rollout"].update(samples=SAMPLES)
    longest = recipe.data.max_prompt_tokens + recipe.data.max_response_tokens
    ratio = max(1, round((dapo.tokens_per_device or 0) / longest))
    tree["dapo"].update(
        train_batch_size=PROMPTS,
        mini_batch_size=PROMPTS // steps_per_batch,
        gen_batch_size=None,
        micro_batch_size=min(2, dapo.micro_batch_size),
        tokens_per_device=2 * ratio * (PROMPT + ANSWER) if dapo.tokens_per_device else None,
        when_exhausted="fill",
    )
    if dapo.overlong:
        tree["dapo"]["overlong"]["buffer_tokens"] = ANSWER // 3
    tree.update(steps=3, validate_every=0)
    tree["optimizer"].update(warmup_steps=min(recipe.optimizer.warmup_steps, 1))
    tree["checkpoint"].update(save_every=2)


def _inputs(tree: dict, folder: Path) -> None:
    tree["model"].update(path=str(folder / "model"), cast_path=None, trust_remote_code=False)
    train, reward = folder / "train.parquet", folder / "reward.py"
    tree["data"].update(train=str(train), val=None, reward=str(reward))


def _sizes(recipe: Recipe, layers: int, changes: list[dict]) -> dict:
    """Changes to the tiny model's sizes that keep what is particular about the recipe's model.

    Raises:
        UsageFault: another family than deepseek_v3.
    """
    file = (recipe.model.path or Path("/nonexistent")) / "config.json"
    sizes: dict = {"num_hidden_layers": layers}
    try:
        config = json.loads(file.read_text())
    except OSError:
        reason = "config.json is not on this machine; the miniature has DeepSeek-V3's shape"
        changes.append({"key": "model.path", "from": str(recipe.model.path), "to": "random weights", "reason": reason})
        return sizes
    except ValueError:
        raise Fault(f"{file} is not JSON; copy config.json again from the model's repository") from None
    if config.get("model_type") != "deepseek_v3":
        raise UsageFault(
            f"{file}: model_type {config.get('model_type')!r} cannot be rehearsed on a CPU; only deepseek_v3 has "
            "torch layers in trainer/cpu/megatron_bridge.py"
        )
    if not config.get("q_lora_rank"):
        sizes["q_lora_rank"] = None
    if (config.get("n_group") or 1) == 1:
        sizes.update(n_group=1, topk_group=1, n_routed_experts=8, num_experts_per_tok=2)
    sizes["rope_scaling"] = config.get("rope_scaling") and {
        **config["rope_scaling"],
        "original_max_position_embeddings": selftest_model.SIZES["rope_scaling"]["original_max_position_embeddings"],
    }
    for name in ("rope_theta", "routed_scaling_factor", "norm_topk_prob", "n_shared_experts"):
        if name in config:
            sizes[name] = config[name]
    return sizes


def _write_prompts(file: Path, rows: int = 64) -> None:
    """Prompts of 3 to 8 characters in verl's parquet schema; deterministic."""
    import random

    import pyarrow
    import pyarrow.parquet

    draw = random.Random(1)
    characters = [chr(33 + i) for i in range(selftest_model.SIZES["vocab_size"] - len(selftest_model.SPECIAL_TOKENS))]
    table = [
        {
            "data_source": "rehearsal",
            "prompt": [{"role": "user", "content": "".join(draw.choices(characters, k=draw.randint(3, PROMPT)))}],
            "ability": "parity",
            "reward_model": {"style": "rule", "ground_truth": str(draw.randint(0, 1))},
            "extra_info": {"split": "train", "index": index},
        }
        for index in range(rows)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), file)


def _pass_through(tree: dict, recipe: Recipe, changes: list[dict]) -> None:
    """Keep the `verl:` keys that a CPU can honour, and no variables of an accelerator."""
    kept = {}
    for key, value in recipe.verl.items():
        reason = next((why for pattern, why in NOT_ON_A_CPU if re.search(pattern, key)), None)
        if reason is None:
            kept[key] = value
        else:
            changes.append({"key": f"verl.{key}", "from": value, "to": None, "reason": reason})
    tree["verl"] = kept
    for name in [name for name in tree["environment"] if re.match(r"HCCL|ASCEND|NPU|PYTORCH_|VLLM|TASK_QUEUE", name)]:
        value = tree["environment"].pop(name)
        changes.append({"key": f"environment.{name}", "from": value, "to": None, "reason": "read by an accelerator"})


def _change(changes: list[dict], section: dict, where: str, name: str, value, reason: str) -> None:
    if section[name] != value:
        changes.append({"key": f"{where}.{name}", "from": section[name], "to": value, "reason": reason})
        section[name] = value
