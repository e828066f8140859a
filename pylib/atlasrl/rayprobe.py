"""Report the nodes of a Ray cluster as JSON lines: `python -m atlasrl.rayprobe ADDRESS`.

A process of its own, since a Ray client hangs for a minute, also at interpreter exit, when its GCS is gone: the node
that watches must stay responsive, so it reads this process's lines and kills it when it is done.

Each line: {"alive": {name: {resource: amount}}}; one at each change and at least every 5 s.
"""

from __future__ import annotations

import json
import sys
import time

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 5.0


def alive(nodes: list[dict]) -> dict[str, dict[str, float]]:
    """Ray's node table, reduced to the names and resources of the nodes that are there."""
    return {n["NodeName"]: {k: v for k, v in n["Resources"].items() if ":" not in k} for n in nodes if n["Alive"]}


def main() -> None:
    import ray

    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", namespace="atlasrl-probe")
    last, spoken = None, 0.0
    while True:
        now = alive(ray.nodes())
        if now != last or time.monotonic() - spoken > HEARTBEAT_SECONDS:
            print(json.dumps({"alive": now}), flush=True)
            last, spoken = now, time.monotonic()
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
