"""A Slurm cluster on this machine, to try things by hand: `up NODES`, `login COMMAND...`, `down`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "pylib")]

import cluster as clusters  # noqa: E402

from atlasrl import processes  # noqa: E402

FOLDER = clusters.home() / "atlasrl-cluster"
FACTS = FOLDER / "facts.json"


def up(nodes: str = "4") -> None:
    if facts := running():
        sys.exit(
            f"error: a cluster of {len(facts['nodes'])} nodes is up already; take it down first: make cluster-down"
        )
    subprocess.run([str(Path(__file__).parent / "install.sh")], check=True)
    cluster = clusters.start(int(nodes), FOLDER, keep_running=True)
    FACTS.write_text(json.dumps({**cluster.facts, "keeper": processes.identity(cluster.keeper.pid)}))
    print(cluster.login("sinfo").stdout, end="")
    print(f"site file: {cluster.site}")
    here = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else __file__
    print(f"log in:    python {here} login COMMAND, for example: login bin/train tiny --site {cluster.site} --nodes 2")


def login(*command: str) -> None:
    facts = running() or sys.exit("error: no cluster is up; run: make cluster-up NODES=4")
    words = clusters.Cluster(FOLDER, facts).words("login", *(command or ("bash",)))
    os.environ["SLURM_CONF"] = facts["conf"]
    os.execvp(words[0], words)


def down() -> None:
    facts = running() or sys.exit("error: no cluster is up")
    processes.signal_process(facts["keeper"], signal.SIGTERM)
    limit = time.monotonic() + 60
    while processes.is_alive(facts["keeper"]) and time.monotonic() < limit:
        time.sleep(0.1)
    for link in (Path(__file__).parents[2] / "runs").glob("*"):
        if link.is_symlink() and link.readlink().is_relative_to(FOLDER):
            link.unlink()
    print("the cluster is down" if not FOLDER.exists() else f"error: the cluster is down but {FOLDER} is still there")


def running() -> dict | None:
    facts = json.loads(FACTS.read_text()) if FACTS.exists() else None
    return facts if facts and processes.is_alive(facts["keeper"]) else None


if __name__ == "__main__":
    {"up": up, "login": login, "down": down}[sys.argv[1]](*sys.argv[2:])
