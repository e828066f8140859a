"""What a job costs around its training: `bin/train` against the bare trainer on a Ray that is already up.

Same recipe, same model, same steps, one after the other on this machine.
Run alone: env/python tests/bench/bench_overhead.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from atlasrl import plan as plans
from atlasrl import raycluster, site
from atlasrl import recipe as recipes
from atlasrl.launch import ports, submission
from atlasrl.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
ONE_NODE = ["backend=fsdp2", "parallel.expert=1"]
"""The bare trainer is measured beside one Ray node; more nodes cost the job, not the trainer."""


def whole_job(run: RunDir) -> float:
    """Seconds of bin/train, from the command to its exit."""
    began = time.perf_counter()
    options = [
        "--name",
        run.name,
        "--runs",
        str(run.path.parent),
        "--nodes",
        "1",
        "--set",
        f"steps={STEPS}",
        *(word for change in ONE_NODE for word in ("--set", change)),
        "--follow",
    ]
    subprocess.run([ROOT / "bin" / "train", "tiny", *options], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def bare_trainer(run: RunDir, model: Path) -> float:
    """Seconds of `python -m atlasrl.trainer` on a running Ray."""
    recipe = recipes.load("tiny", [f"steps={STEPS}", *ONE_NODE])
    plan = replace(plans.make(recipe, site.load("local"), run, nodes=1), model=str(model))
    plan = replace(
        plan, overrides=[replace(o, value=str(model)) if o.value == str(run.model) else o for o in plan.overrides]
    )
    run.path.mkdir(parents=True)
    run.plan.write_text(plan.to_json())
    attempt = submission.open_attempt(plan, None)
    environment = {**os.environ, **{name: value.value for name, value in plan.environment.items()}}
    with ports.take("bench") as chosen:
        node = plans.ray_node(plan, 1, 0, "127.0.1.1", chosen)
        raycluster.make_temp(node.temp)
        command = raycluster.start_command(plan.python, node, node.gcs_address)
        daemon = raycluster.Daemon(node, command, {**environment, **chosen.environment()}, attempt.logs / "ray.log")
        client = {**environment, "RAY_ADDRESS": node.gcs_address}
        watch = raycluster.Watch(node.gcs_address, client, attempt.logs / "probe.log")
        try:
            raycluster.wait_for_nodes(watch, 1, plan.devices_per_node, 120, daemon.check, str)
            began = time.perf_counter()
            subprocess.run(
                [plan.python, "-m", "atlasrl.trainer", plan.run, "--attempt", "1"],
                env=client,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            return time.perf_counter() - began
        finally:
            watch.close()
            daemon.close()
            raycluster.remove_temp(node.temp)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="atlasrl-bench-") as folder:
        job = RunDir(Path(folder) / "job")
        whole = whole_job(job)
        bare = bare_trainer(RunDir(Path(folder) / "bare"), job.model)
        print(f"{'bin/train, ' + str(STEPS) + ' steps':42} {whole:7.1f} s")
        for event in job.events():
            if event["event"] in ("stage_end", "ray_up"):
                print(f"{'  ' + event.get('stage', 'Ray up'):42} {event['seconds']:7.1f} s")
        print(f"{'bare trainer on a running Ray':42} {bare:7.1f} s")
        print(f"{'bin/train / bare trainer':42} {whole / bare:7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
