"""The memory model against measurements: search time, reading profiles of gigabytes, and a real CPU run.

    env/python tests/bench/bench_memory.py [--gigabytes 1] [--skip run]

1. Search of all splits of DeepSeek-V3 on 32 x 8 devices: < 2 s of CPU.
2. A generated `operator_memory.csv` and `memory_record.csv`, together --gigabytes: >= 200 MB/s, and no more than 600 MB
   of resident memory however long they are; the planted peak, HCCL share and leak come out.
3. `bin/train tiny` with the memory probe, as it is, and with more words on both backends: bytes of weights, gradients,
   optimizer and logits of every worker exactly as predicted, resident growth of every phase within 15 %.
Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pylib", "tests/memory", "jobs/inputs/tiny")
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


PUBLISHED_ONLY = {"quantization_config", "architectures", "model_type", "torch_dtype"}  # of the FP8 checkpoint
VOCABULARY = 16384  # logits of 2 MiB a row stand out of what an allocator and a few libraries leave behind
WIDE = {
    "data.max_response_tokens": 48,
    "rollout.samples": 4,
    "dapo.train_batch_size": 8,
    "dapo.mini_batch_size": 8,
    "dapo.gen_batch_size": 8,
    "dapo.micro_batch_size": 4,
    "dapo.dynamic_sampling": False,  # an untrained model answers nothing right
}
CASES = {
    "tiny": {},
    "wide": WIDE,
    "wide, FSDP2": WIDE | {"backend": "fsdp2", "parallel.expert": 1},
}


def write_wide_model(folder: Path) -> dict:
    """The tiny model with more words, untrained; the settings that name it."""
    import shutil

    import base_model
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    plain = {key: value for key, value in base_model.CONFIG.items() if key not in PUBLISHED_ONLY}
    config = DeepseekV3Config(**plain | {"num_nextn_predict_layers": 0, "vocab_size": VOCABULARY})
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    for file in (ROOT / "jobs/inputs/tiny/model").glob("*.j*"):
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return {"model.path": folder}


def bench_runs(folder: Path) -> dict:
    wide = write_wide_model(folder / "model")
    results = {name: bench_run(folder, name, case | (wide if case else {})) for name, case in CASES.items()}
    return results | {"ok": all(result["ok"] for result in results.values())}


def bench_run(folder: Path, name: str, changes: dict) -> dict:
    """Train three steps of the tiny recipe with the memory probe; what its workers held beside what was predicted."""
    from atlasrl.memory import profiled_run
    from atlasrl.rundir import RunDir

    run = RunDir(folder / name.replace(", ", "-"))
    settings = {"steps": 3, "validate_every": 0, "probe.memory": True} | changes
    command = [ROOT / "bin/train", "tiny", "--follow", "--runs", run.path.parent, "--name", run.path.name]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {name} failed with exit code {done.returncode}: {done.stderr[-1000:]}")
    workers = profiled_run.compared(run.attempts()[-1])
    return {
        "tensor_bytes": {f"worker {w.rank}": w.tensors for w in workers},
        "growth": [
            f"worker {w.rank} {g.phase} step {g.step}: {g.measured / MB:.1f} MiB, predicted {g.predicted / MB:.1f} "
            f"({g.off:+.1%})"
            for w in workers
            for g in w.growths
        ],
        "ok": all(found == predicted for w in workers for found, predicted in w.tensors.values())
        and all(abs(g.off) <= TARGET_GROWTH for w in workers for g in w.growths),
    }


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
