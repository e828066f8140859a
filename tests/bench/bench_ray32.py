"""Ray on 32 emulated nodes of 8 NPUs, as a Slurm job of ours, against what verl and Ray offer for it.

    env/python tests/bench/bench_ray32.py [--nodes 32] [--window 3] [--only ours schedule symmetric]

ours       bin/train with a driver that pins one actor of 8 NPUs on every node. Wanted: all nodes and NPUs are there,
           each actor on its node, no process is left on any node, all joined in a third of the time of the schedule.
schedule   head, 10 s, then an `srun ray start` every 5 s (verl, examples/slurm/ray_on_slurm.slurm), until all joined
symmetric  `srun ray symmetric-run`, all nodes at once
Exit code 1 if a target is missed. About 10 minutes and 12 GB for 32 nodes on 2 cores.

The emulated nodes share the cores of one machine, and a node costs eight seconds of CPU until it has joined, six of
them Ray's own daemons, and more while it waits for the last: the schedule leaves it five. So it is also told how many
cores a third of the schedule takes.
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

GIGABYTES_PER_NODE = 0.4
LIMIT_SECONDS = 900

HEADER = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --output={out} --cpus-per-task=8
export PATH={bin}:$PATH RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
options=(--disable-usage-stats --num-cpus=28 --object-store-memory=83886080 --temp-dir=/tmp/bench)
options+=(--resources='{{"NPU": 8}}')
"""
SCHEDULE = """
ip=$(getent ahostsv4 "${{nodes[0]}}" | head -n 1 | cut -d' ' -f1)
start() {{ srun --nodes=1 --ntasks=1 -w "$1" ray start "${{@:2}}" "${{options[@]}}" --block >/dev/null 2>&1 & }}
start "${{nodes[0]}}" --head --node-ip-address="$ip" --port=6379 --include-dashboard=false
sleep 10
for node in "${{nodes[@]:1}}"; do start "$node" --address "$ip:6379"; sleep 5; done
RAY_ADDRESS=$ip:6379 srun --overlap --nodes=1 --ntasks=1 -w "${{nodes[0]}}" python {wait} {nodes}
"""
SYMMETRIC = """
srun ray symmetric-run --address "${{nodes[0]}}:6379" --min-nodes {nodes} "${{options[@]}}" -- python {wait} {nodes}
"""
WAIT = """
import sys, time, ray
ray.init(address="auto", log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]): time.sleep(0.2)
print("all joined", flush=True)
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


def slept(nodes: int) -> float:
    """What the schedule sleeps, in seconds."""
    return 10 + 5 * (nodes - 1)


def cpu_seconds() -> float:
    """What all cores of this machine have worked since it was started."""
    spent = psutil.cpu_times()
    return sum(spent) - spent.idle - spent.iowait - spent.guest - spent.guest_nice  # guests count as user


def bench_ours(cluster: clusters.Cluster, window: int) -> dict:
    nodes, worked = len(cluster.nodes), cpu_seconds()
    job = jobs.train(
        cluster,
        "pinned",
        nodes=nodes,
        site={"ray": {"deadline": 300, "deadline_per_node": 10, "join_window": window, "object_store_mb": 80}},
        devices_per_node=8,
        dapo__train_batch_size=16 * nodes,
        dapo__mini_batch_size=16 * nodes,
        environment={"LIGHT_PIN": "1"},
    )
    job.wait(lambda: job.events("ray_up"), LIMIT_SECONDS, "all nodes")
    worked = cpu_seconds() - worked
    job.wait(lambda: (job.run.path / "pinned.json").exists(), LIMIT_SECONDS, "the actors")
    used = memory_gb(cluster.keeper.pid)
    released = time.monotonic()
    (job.run.path / "finish").touch()
    job.wait(lambda: cluster.job_state(job.id) == "COMPLETED", 300, "its last process to leave")
    down = time.monotonic() - released
    left = [cluster.on(node, "pgrep", "-f", "ray|atlasrl", check=False).stdout.split() for node in cluster.nodes]
    times = {event["event"]: event["time"] for event in job.events("submitted", "checked_in", "ray_up")}
    first_ray = min(event["time"] for event in job.events("ports"))
    return {
        **json.loads((job.run.path / "pinned.json").read_text()),
        "submit_to_all_answered": round(times["checked_in"] - times["submitted"], 1),
        "first_ray_to_all_joined": round(times["ray_up"] - first_ray, 1),
        "submit_to_all_joined": round(times["ray_up"] - times["submitted"], 1),
        "cpu_seconds_to_all_joined": round(worked, 1),
        "finish_to_all_gone": round(down, 1),
        "gigabytes": round(used, 1),
        "processes_left": sum(map(len, left)),
    }


def bench_script(cluster: clusters.Cluster, name: str, body: str) -> dict:
    """Submit a batch script and wait until its Ray has all nodes; then until the job has ended, by itself or by us."""
    folder, nodes = cluster.shared, len(cluster.nodes)
    wait, script, out = folder / "wait.py", folder / f"{name}.sh", folder / f"{name}.out"
    wait.write_text(WAIT)
    bin_folder = Path(sys.prefix) / "bin"
    script.write_text((HEADER + body).format(nodes=nodes, out=out, bin=bin_folder, wait=wait))
    started = time.monotonic()
    job = cluster.login("sbatch", "--parsable", str(script)).stdout.strip()

    def told() -> str:
        return out.read_text() if out.exists() else ""

    def over() -> bool:
        return cluster.job_state(job) not in ("PENDING", "RUNNING", "COMPLETING")

    cluster.wait_for(lambda: "all joined" in told() or over(), LIMIT_SECONDS, name)
    seconds = time.monotonic() - started
    if "all joined" not in told():
        return {"failed_after": round(seconds, 1), "words": told().strip().splitlines()[-1:]}
    if body is SCHEDULE:  # its ray processes stay until the job is cancelled
        cluster.login("scancel", job)
    cluster.wait_for(over, 300, f"the end of {name}")
    down = time.monotonic() - started - seconds
    return {"submit_to_all_joined": round(seconds, 1), "joined_to_all_gone": round(down, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument(
        "--window", type=int, default=3, help="nodes that join at once; on two cores 8 take 4 times longer than 3"
    )
    benches = {
        "ours": lambda cluster: bench_ours(cluster, options.window),
        "schedule": lambda cluster: bench_script(cluster, "schedule", SCHEDULE),
        "symmetric": lambda cluster: bench_script(cluster, "symmetric", SYMMETRIC),
    }
    parser.add_argument("--only", nargs="+", default=list(benches), choices=list(benches))
    options = parser.parse_args()
    free, needed = psutil.virtual_memory().available / 1e9, GIGABYTES_PER_NODE * options.nodes + 1
    if free < needed:
        print(f"error: {options.nodes} nodes need about {needed:.0f} GB and {free:.0f} GB are free; lower --nodes")
        return 2
    subprocess.run([str(ROOT / "tests" / "cluster" / "install.sh")], check=True)
    results = {}
    for name in options.only:
        with clusters.running(options.nodes) as cluster:  # a cluster each: nothing of the other is warm or left
            results[name] = benches[name](cluster)
            print(json.dumps({name: results[name]}), flush=True)
    missed = []
    if ours := results.get("ours"):
        whole = (ours["nodes"], ours["npus"], ours["actors_on_their_node"])
        missed += ["nodes"] if whole != (options.nodes, 8 * options.nodes, options.nodes) else []
        missed += ["processes left"] if ours["processes_left"] else []
        if schedule := results.get("schedule"):
            # on few cores the schedule fails: a start takes more than Ray's 30 s; then its sleeps count
            limit = schedule.get("submit_to_all_joined", slept(options.nodes))
            ratio = limit / ours["submit_to_all_joined"]
            cores = ours["cpu_seconds_to_all_joined"] / (limit / 3)
            print(
                f"all joined {ratio:.1f} times sooner than by the schedule ({limit:.0f} s); three times takes "
                f"{cores:.1f} cores, here are {psutil.cpu_count()}"
            )
            missed += ["a third"] if ratio < 3 else []
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
