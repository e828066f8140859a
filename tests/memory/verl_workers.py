"""Run the workers of a small recipe with the memory probe."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from atlasrl import recipe as recipes
from atlasrl.memory import measured
from atlasrl.recipe import Recipe

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "trainer"))
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_workers(folder: Path, vocabulary: int, *, world: int, steps: int, **changes) -> tuple[Recipe, list[list[dict]]]:
    """Train `steps` steps on `world` workers; the recipe, and the probe's records of each worker."""
    import trainer_assets
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    assets = trainer_assets.make_assets(folder / "assets")
    DeepseekV3ForCausalLM(DeepseekV3Config(**TINY, vocab_size=vocabulary)).save_pretrained(assets["model"])
    shape = {"devices_per_node": world, "data__max_prompt_tokens": 16, "data__max_response_tokens": 48}
    shape |= {"dapo__micro_batch_size": 4, "rollout__samples": world, "dapo__train_batch_size": 8}
    tree = trainer_assets.recipe_tree(
        assets, **shape, dapo__mini_batch_size=8, dapo__dynamic_sampling=False, probe__memory=True, **changes
    )
    run = trainer_assets.write_plan(folder / "run", tree, assets)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1] / "pylib")}
    port = str(free_port())
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "verl_worker.py"), str(run.path), str(rank), port, str(steps)],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    errors = [worker.communicate(timeout=500)[1].decode() for worker in workers]
    for worker, error in zip(workers, errors, strict=True):
        assert worker.returncode == 0, error[-2000:]
    return recipes.parse(tree, "test"), measured.read(run.attempt(1).workers)
