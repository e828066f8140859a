"""Step time on a CPU: whole-batch rollouts against verl's own agent loop, same model, data and seeds.

    python tests/bench/bench_rollout.py [--steps 8] [--prompts 16] [--samples 8] [--workers 1]

Prints one table; exits 1 when whole-batch rollouts are less than 3 times faster per step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "pylib"), str(ROOT / "tests" / "trainer")]

GOAL = 3.0
AGENT_LOOP = {
    "++actor_rollout_ref.rollout.agent.agent_loop_manager_class": "atlasrl.trainer.cpu.agent_loop.AgentLoopRollouts"
}
COLUMNS = {"step": "timing_s/step", "generate": "timing_s/gen", "update": "timing_s/update_actor"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="answers per prompt")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "whole batch": medians(Path(folder) / "batch", options, {}),
            "verl's agent loop": medians(Path(folder) / "loop", options, AGENT_LOOP),
        }
    print(
        f"median seconds per step, {options.prompts} prompts x {options.samples} answers, {options.workers} worker(s)"
    )
    print(f"{'':20}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name, row in rows.items():
        print(f"{name:20}" + "".join(f"{row[column]:12.3f}" for column in COLUMNS))
    ratios = {column: rows["verl's agent loop"][column] / rows["whole batch"][column] for column in COLUMNS}
    print(f"{'times faster':20}" + "".join(f"{ratios[column]:12.1f}" for column in COLUMNS))
    return 0 if ratios["step"] >= GOAL else 1


def medians(folder: Path, options: argparse.Namespace, verl: dict) -> dict[str, float]:
    """Run one training and take the medians of its steps but the first, which warms up."""
    from trainer_assets import make_assets, recipe_tree, write_plan

    from atlasrl.rundir import read_json_lines

    assets = make_assets(folder / "assets", prompts=256)
    tree = recipe_tree(
        assets,
        steps=options.steps + 1,
        devices_per_node=options.workers,
        data__max_response_tokens=14,
        rollout__samples=options.samples,
        dapo__train_batch_size=options.prompts,
        dapo__mini_batch_size=options.prompts,
        dapo__micro_batch_size=options.prompts * options.samples // options.workers,
        dapo__dynamic_sampling=False,
        checkpoint__save_every=1000,
        verl=verl,
    )
    run = write_plan(folder / "run", tree, assets)
    log = folder / "train.log"
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "atlasrl.trainer", str(run.path), "--attempt", "1"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "pylib"), "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        print("\n".join(log.read_text().splitlines()[-20:]), file=sys.stderr)
        raise SystemExit(f"the training behind this figure failed with code {done.returncode}")
    steps = [line["data"] for line in read_json_lines(run.attempt(1).metrics)][1:]
    return {name: statistics.median(step[tag] for step in steps) for name, tag in COLUMNS.items()}


if __name__ == "__main__":
    sys.exit(main())
