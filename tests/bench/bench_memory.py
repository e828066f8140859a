"""The memory model against measurements: search time, reading profiles of gigabytes, and a real CPU run.

    env/python tests/bench/bench_memory.py [--gigabytes 1] [--skip run]

1. Search of all splits of DeepSeek-V3 on 32 x 8 devices: < 2 s of CPU.
2. A generated `operator_memory.csv` and `memory_record.csv`, together --gigabytes: >= 200 MB/s, and no more than 600 MB
   of resident memory however long they are; the planted peak, HCCL share and leak come out.
3. The trainer itself, two FSDP2 workers on the CPU with the memory probe: bytes of weights, gradients, optimizer and
   logits exactly as predicted, resident growth of every phase within 15 %.
Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "pylib"), str(ROOT / "tests" / "memory"), str(ROOT / "tests" / "trainer")]

TARGET_SEARCH, TARGET_RATE, TARGET_RESIDENT, TARGET_GROWTH = 2.0, 200e6, 600e6, 0.15
MB = 2**20

READER = """
import json, resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from atlasrl.memory import profile
import pyarrow.csv  # the import is not the reading
started = time.perf_counter(), time.process_time()
(found,) = profile.read(Path(sys.argv[1]))
spent = time.perf_counter() - started[0], time.process_time() - started[1]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(dict(wall=spent[0], cpu=spent[1], resident=peak, **profile.as_json(found))))
"""


def bench_search() -> dict:
    from atlasrl import recipe as recipes
    from atlasrl.memory import verdict

    started = time.process_time()
    found = verdict.ranked(recipes.load("deepseek-v3-671b-dapo"), nodes=32).found
    seconds = time.process_time() - started
    return {"splits": len(found), "cpu_seconds": round(seconds, 2), "ok": seconds < TARGET_SEARCH}


def write_tables(folder: Path, size: int) -> None:
    """Two tables of together `size` bytes: a leak of 3 MB/s, one peak of 60,000 MB, HCCL a tenth of it."""
    from tables import OPERATORS, Row, msprof_module, operator_line, torch_npu_record

    half = size // 2
    with (folder / "operator_memory.csv").open("w") as file:
        file.write(OPERATORS)
        block = "".join(
            operator_line(f"aten::op{i % 40}", i % 900, i / 1e3, i / 1e3 + 0.2, i % 700) for i in range(50_000)
        )
        while file.tell() < half:
            file.write(block)
    line = 76
    count = half // line
    rows = (Row("PTA", 100 * i / count, 52_000, 20_000 + i % 900 + 300 * i / count) for i in range(count))
    torch_npu_record(folder / "memory_record.csv", rows)
    module = [
        Row(c, i / 10, size)
        for i in range(1000)
        for c, size in (("APP", 60_000 if i == 77 else 54_000), ("HCCL", 6_000))
    ]
    msprof_module(folder / "npu_module_mem_0.csv", module)


def bench_profile(folder: Path, size: int) -> dict:
    write_tables(folder, size)
    bytes_read = sum(file.stat().st_size for file in folder.iterdir())
    command = [sys.executable, "-c", READER, str(folder), str(ROOT / "pylib")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    rate = bytes_read / found["wall"]
    leak = found["leak"]["bytes_per_second"] / MB if found["leak"] else 0
    planted = found["peaks"]["APP"] == 60_000 * MB and found["hccl_share"] == 0.1 and abs(leak / 3 - 1) < 0.05
    return {
        "bytes": bytes_read,
        "MB_per_second": round(rate / 1e6),
        "MB_per_cpu_second": round(bytes_read / found["cpu"] / 1e6),
        "resident_MB": round(found["resident"] / 1e6),
        "planted_facts_found": planted,
        "ok": rate >= TARGET_RATE and found["resident"] <= TARGET_RESIDENT and planted,
    }


# --- a real run -------------------------------------------------------------------------------------------------------

MODEL = {
    "vocab_size": 16384,
    "hidden_size": 128,
    "intermediate_size": 320,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}


def make_run(folder: Path, world: int, steps: int):
    """A run of the tiny recipe's shape, but with a vocabulary whose tensors stand out of a process of 400 MB."""
    import trainer_assets
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    trainer_assets.untrained_model = lambda _experts: DeepseekV3ForCausalLM(DeepseekV3Config(**MODEL))
    assets = trainer_assets.make_assets(folder / "assets")
    tree = trainer_assets.recipe_tree(
        assets,
        devices_per_node=world,
        steps=steps,
        data__max_prompt_tokens=16,
        data__max_response_tokens=48,
        rollout__samples=4,
        dapo__train_batch_size=8,
        dapo__mini_batch_size=8,
        dapo__micro_batch_size=4,
        dapo__dynamic_sampling=False,
        checkpoint__save_every=100,
    )
    return trainer_assets.write_plan(folder / "run", tree, assets)


def bench_run(folder: Path, world: int = 2, steps: int = 3) -> dict:
    from measured import ALLOCATOR, exact, growth, predicted

    from atlasrl import recipe as recipes
    from atlasrl.memory import architecture, sharded

    run = make_run(folder, world, steps)
    probe = folder / "probe"
    probe.mkdir()
    extra = ALLOCATOR | {
        "VERL_USE_EXTERNAL_MODULES": "atlasrl.trainer.cpu,atlasrl.trainer.memory_probe",
        "ATLASRL_MEMORY_PROBE": str(probe),
        "OMP_NUM_THREADS": "1",
    }
    plan = json.loads(run.plan.read_text())
    plan["environment"] |= extra
    run.plan.write_text(json.dumps(plan))
    env = {**os.environ, **extra, "PYTHONPATH": f"{ROOT / 'pylib'}:{ROOT}"}
    env.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "atlasrl.trainer", str(run.path), "--attempt", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: the run failed with exit code {done.returncode}: {done.stderr[-1000:]}")

    recipe = recipes.parse(plan["recipe"], str(run.plan))
    config = json.loads((folder / "assets" / "model" / "config.json").read_text())
    a, batch = architecture.from_config(config), sharded.batch_of(recipe, world)
    expected = {
        "log_prob": sharded.score_growth(a, batch).total,
        "update": sharded.update_growth(a, batch, world).total,
    }
    result: dict = {"exact": {}, "growth": {}, "ok": True}
    for rank in range(world):
        records = [json.loads(line) for line in (probe / f"rank{rank}.jsonl").read_text().splitlines()]
        measured, model = exact(records), predicted(config, batch, world, rank)
        result["exact"][f"worker {rank}"] = {kind: [measured.get(kind), size] for kind, size in model.items()}
        result["ok"] &= measured == model
        for phase, size in expected.items():
            # The first step also loads libraries and creates the optimizer state.
            grown = growth(records, phase)[1:]
            off = [round(each / size - 1, 3) for each in grown]
            result["growth"][f"worker {rank} {phase}"] = {
                "predicted_MiB": round(size / MB, 1),
                "measured_MiB": [round(each / MB, 1) for each in grown],
                "off": off,
            }
            result["ok"] &= all(abs(each) <= TARGET_GROWTH for each in off)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the generated tables")
    parser.add_argument("--skip", action="append", default=[], choices=["search", "profile", "run"])
    options = parser.parse_args()
    benches = {
        "search": lambda folder: bench_search(),
        "profile": lambda folder: bench_profile(folder, int(options.gigabytes * 1e9)),
        "run": bench_run,
    }
    results = {}
    for name, bench in benches.items():
        if name in options.skip:
            continue
        with tempfile.TemporaryDirectory(prefix="atlasrl-bench-") as folder:
            results[name] = bench(Path(folder))
        print(name, json.dumps(results[name], indent=1), flush=True)
    missed = [name for name, result in results.items() if not result["ok"]]
    print(f"missed: {', '.join(missed)}" if missed else "all targets are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
