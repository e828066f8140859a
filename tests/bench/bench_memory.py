"""The memory model against measurements: search time, reading profiles of gigabytes, and a real CPU run.

    env/python tests/bench/bench_memory.py [--gigabytes 1] [--skip run]

1. Search of all splits of DeepSeek-V3 on 32 x 8 devices: < 2 s of CPU.
2. A generated `operator_memory.csv` and `memory_record.csv`, together --gigabytes: >= 200 MB/s, and no more than 600 MB
   of resident memory however long they are; the planted peak, HCCL share and leak come out.
3. The trainer itself on the CPU with the memory probe, in the tiny recipe's shape and with two workers and more words:
   bytes of weights, gradients, optimizer and logits exactly as predicted, resident growth of every phase within 15 %.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pylib", "tests/memory", "tests/trainer", "jobs/inputs/tiny")
sys.path[:0] = [str(ROOT / source) for source in SOURCES]

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


@dataclass(frozen=True)
class Case:
    """A run that is measured: what is changed of the tiny model, workers, answer length, rows of a micro-batch."""

    changes: dict
    world: int
    answer_tokens: int
    rows: int
    prompts: int
    samples: int


CASES = {
    "tiny": Case({}, world=1, answer_tokens=12, rows=64, prompts=16, samples=8),  # jobs/recipes/tiny.yaml
    # Two workers, and logits that stand out of everything else.
    "vocabulary": Case({"vocab_size": 16384}, world=2, answer_tokens=48, rows=4, prompts=8, samples=4),
}
PUBLISHED_ONLY = {"quantization_config", "architectures", "model_type", "torch_dtype"}  # of the FP8 checkpoint


def model_config(case: Case) -> dict:
    from base_model import CONFIG

    plain = {key: value for key, value in CONFIG.items() if key not in PUBLISHED_ONLY}
    return plain | {"num_nextn_predict_layers": 0} | case.changes


def make_run(folder: Path, case: Case, steps: int):
    import trainer_assets
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    trainer_assets.untrained_model = lambda _experts: DeepseekV3ForCausalLM(DeepseekV3Config(**model_config(case)))
    assets = trainer_assets.make_assets(folder / "assets")
    tree = trainer_assets.recipe_tree(
        assets,
        devices_per_node=case.world,
        steps=steps,
        data__max_prompt_tokens=16,
        data__max_response_tokens=case.answer_tokens,
        rollout__samples=case.samples,
        dapo__train_batch_size=case.prompts,
        dapo__mini_batch_size=case.prompts,
        dapo__micro_batch_size=case.rows,
        dapo__dynamic_sampling=False,
        checkpoint__save_every=100,
    )
    return trainer_assets.write_plan(folder / "run", tree, assets)


def bench_runs(folder: Path) -> dict:
    results = {name: bench_run(folder / name, case) for name, case in CASES.items()}
    return results | {"ok": all(result["ok"] for result in results.values())}


def bench_run(folder: Path, case: Case, steps: int = 3) -> dict:
    from fsdp2_workers import ALLOCATOR, predicted

    from atlasrl import recipe as recipes
    from atlasrl.memory import architecture, sharded
    from atlasrl.memory import measured as measurements

    world = case.world
    folder.mkdir()
    run = make_run(folder, case, steps)
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
    for rank, records in enumerate(measurements.read(probe)):
        measured, model = measurements.exact(records), predicted(config, batch, world, rank)
        result["exact"][f"worker {rank}"] = {kind: [measured.get(kind), size] for kind, size in model.items()}
        result["ok"] &= measured == model
        for phase, size in expected.items():
            # The first step also loads libraries and creates the optimizer state.
            grown = measurements.growth(records, phase)[1:]
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
        "run": bench_runs,
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
