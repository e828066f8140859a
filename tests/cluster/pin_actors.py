"""Pin one actor that takes all NPUs on each node of the Ray cluster, ask each where it is, hold them for `finish`."""

import json
import os
import sys
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

HOLD_SECONDS = 300


@ray.remote(num_cpus=0)
class Where:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def main(run: Path) -> None:
    started = time.monotonic()
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    nodes = {node["NodeID"]: node["Resources"].get("NPU", 0) for node in ray.nodes() if node["Alive"]}
    connected = time.monotonic()
    actors = [
        Where.options(
            resources={"NPU": amount}, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node, amount in nodes.items()
    ]
    where = ray.get([actor.node.remote() for actor in actors])
    told = {
        "nodes": len(nodes),
        "npus": sum(nodes.values()),
        "actors_on_their_node": sum(here == node for here, node in zip(where, nodes, strict=True)),
        "connect_seconds": round(connected - started, 1),
        "actor_seconds": round(time.monotonic() - connected, 1),
    }
    (run / "pinned.json").write_text(json.dumps(told))
    limit = time.monotonic() + HOLD_SECONDS
    while not (run / "finish").exists() and time.monotonic() < limit:
        time.sleep(0.2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
