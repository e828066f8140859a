"""Run real FSDP2 workers of verl with the memory probe."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from atlasrl.memory import architecture, measured, sharded

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

TINY = {
    "model_type": "deepseek_v3",
    "vocab_size": 4096,
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
    "tie_word_embeddings": False,
}

# glibc raises its threshold for separate mappings with every freed block, and then keeps freed memory: resident memory
# would show the history instead of the tensors. A fixed one gives every larger tensor back to the system when it dies.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_workers(
    folder: Path, config: dict, batch: sharded.Batch, *, world: int, answers: int, steps: int
) -> list[list[dict]]:
    """Run `world` workers and return the probe's records of each."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "spec.json"
    fields = {"config": config, "batch": asdict(batch), "world": world, "answers": answers, "steps": steps}
    spec.write_text(json.dumps(fields | {"port": free_port(), "folder": str(folder)}))
    env = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'pylib'}:{ROOT}"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / "fsdp2_worker.py"), str(spec), str(rank)], env=env, stderr=subprocess.PIPE
        )
        for rank in range(world)
    ]
    outputs = [worker.communicate(timeout=500)[1].decode() for worker in workers]
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output[-2000:]
    return measured.read(folder)


def predicted(config: dict, batch: sharded.Batch, world: int, rank: int) -> dict[str, int]:
    return asdict(sharded.worker(architecture.from_config(config), batch, world, rank))
