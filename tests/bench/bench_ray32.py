"""Ray on 32 emulated nodes of 8 NPUs, as a Slurm job of ours, against the schedule of verl's Slurm example.

    env/python tests/bench/bench_ray32.py [--nodes 32] [--window 8] [--skip schedule]

1. ours: bin/train with a driver that pins one actor of 8 NPUs on every node. Wanted: all nodes and NPUs are there, each
   actor on its node, no process left on any node, and all joined in at most a third of 2.
2. schedule: head, 10 s, then an `srun ray start` every 5 s (verl, examples/slurm/ray_on_slurm.slurm), until all joined.
Exit code 1 if a target is missed. About 5 minutes and 8 GB for 32 nodes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "pylib"), str(ROOT / "tests" / "cluster")]

import cluster as clusters  # noqa: E402
import psutil  # noqa: E402

import jobs  # noqa: E402

SCHEDULE = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --output={folder}/schedule.out --cpus-per-task=8
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
ip=$(getent ahostsv4 "${{nodes[0]}}" | head -n 1 | cut -d' ' -f1)
options="--disable-usage-stats --num-cpus=28 --object-store-memory=83886080 --temp-dir=/tmp/schedule --block"
start() {{
    srun --nodes=1 --ntasks=1 -w "$1" {ray} start "${{@:2}}" --resources='{{"NPU": 8}}' $options >/dev/null 2>&1 &
}}
start "${{nodes[0]}}" --head --node-ip-address="$ip" --port=6379 --include-dashboard=false
sleep 10
for node in "${{nodes[@]:1}}"; do start "$node" --address "$ip:6379"; sleep 5; done
RAY_ADDRESS=$ip:6379 srun --overlap --nodes=1 --ntasks=1 -w "${{nodes[0]}}" {python} {wait} {nodes}
"""
WAIT = """
import os, sys, time, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]): time.sleep(0.2)
print("joined", flush=True)
"""


def memory_gb(keeper: int) -> float:
    """Proportional set size of everything below the keeper."""
    total = 0
    for process in psutil.Process(keeper).children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 1e9


def bench_ours(cluster: clusters.Cluster, nodes: int, window: int) -> dict:
    site = {"ray": {"deadline": 300, "deadline_per_node": 10, "join_window": window, "object_store_mb": 80}}
    started = time.monotonic()
    job = jobs.train(
        cluster,
        "pinned",
        nodes=nodes,
        site=site,
        devices_per_node=8,
        dapo__train_batch_size=512,
        dapo__mini_batch_size=512,
        environment={"LIGHT_PIN": "1"},
    )
    job.wait(lambda: (job.run.path / "pinned.json").exists(), 900, "the actors")
    used = memory_gb(cluster.keeper.pid)
    job.wait_for_end(300)
    whole = time.monotonic() - started
    times = {event["event"]: event["time"] for event in job.events("submitted", "allocated", "checked_in", "ray_up")}
    ports = [event["time"] for event in job.events("ports")]
    left = sum(
        len(cluster.on(node, "pgrep", "-f", "ray|atlasrl", check=False).stdout.split()) for node in cluster.nodes
    )
    return {
        **json.loads((job.run.path / "pinned.json").read_text()),
        "submit_to_all_answered": round(times["checked_in"] - times["submitted"], 1),
        "first_ray_to_all_joined": round(times["ray_up"] - min(ports), 1),
        "submit_to_all_joined": round(times["ray_up"] - times["submitted"], 1),
        "whole_job": round(whole, 1),
        "gigabytes": round(used, 1),
        "processes_left": left,
        "kind": job.events("decided")[-1]["kind"],
    }


def bench_schedule(cluster: clusters.Cluster, nodes: int) -> dict:
    folder = cluster.shared
    (folder / "wait.py").write_text(WAIT)
    script = folder / "schedule.sh"
    ray = Path(sys.prefix) / "bin" / "ray"
    words = {"nodes": nodes, "folder": folder, "ray": ray, "python": sys.executable, "wait": folder / "wait.py"}
    script.write_text(SCHEDULE.format(**words))
    started = time.monotonic()
    job = cluster.login("sbatch", "--parsable", str(script)).stdout.strip()
    out = folder / "schedule.out"
    cluster.wait_for(lambda: out.exists() and "joined" in out.read_text(), 900, "the schedule")
    seconds = time.monotonic() - started
    cluster.login("scancel", job)
    return {"submit_to_all_joined": round(seconds, 1), "sleeps": 10 + 5 * (nodes - 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--window", type=int, default=8, help="nodes that may join at the same time")
    parser.add_argument("--skip", nargs="*", default=[], choices=["ours", "schedule"])
    options = parser.parse_args()
    subprocess.run([str(ROOT / "tests" / "cluster" / "install.sh")], check=True)
    results = {}
    for name, bench in (
        ("ours", lambda c: bench_ours(c, options.nodes, options.window)),
        ("schedule", lambda c: bench_schedule(c, options.nodes)),
    ):
        if name not in options.skip:
            with clusters.running(options.nodes) as cluster:  # a cluster each: nothing of the other is warm or left
                results[name] = bench(cluster)
                print(json.dumps({name: results[name]}), flush=True)
    missed = []
    if ours := results.get("ours"):
        whole = (ours["nodes"], ours["npus"], ours["actors_on_their_node"])
        missed += ["nodes"] if whole != (options.nodes, 8 * options.nodes, options.nodes) else []
        missed += ["processes left"] if ours["processes_left"] else []
    if len(results) == 2:
        ratio = results["schedule"]["submit_to_all_joined"] / ours["submit_to_all_joined"]
        print(f"all joined {ratio:.1f} times sooner than by the schedule")
        missed += ["a third"] if ratio < 3 else []
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
