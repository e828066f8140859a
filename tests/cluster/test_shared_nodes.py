"""Two jobs on the same nodes, and somebody else's Ray between them."""

import sys
from pathlib import Path

import pytest

from jobs import train

pytestmark = pytest.mark.cluster
RAY = str(Path(sys.prefix) / "bin" / "ray")


@pytest.fixture
def foreign_ray(cluster):
    """A Ray of another user of node01, on Ray's default ports."""
    if cluster.facts["mode"] != "namespaces":
        pytest.skip("in loopback mode this Ray would be that of the machine")
    start = [RAY, "start", "--head", "--num-cpus=1", "--include-dashboard=false", "--disable-usage-stats"]
    try:
        cluster.on("node01", *start, "--object-store-memory=80000000", "--temp-dir=/tmp/foreign", timeout=120)
        yield lambda: set(cluster.on("node01", "pgrep", "-f", "/tmp/foreign/session").stdout.split())
    finally:
        cluster.on("node01", "pkill", "-KILL", "-f", "/tmp/foreign/session", check=False)


def test_two_jobs_share_nodes_and_a_foreign_ray_survives_both(cluster, foreign_ray):
    before = foreign_ray()
    assert before
    left_before = {node: folders(cluster, node) for node in cluster.nodes}  # a node that lost its power cleaned nothing
    jobs = [
        train(cluster, name, nodes=2, steps=30, environment={"LIGHT_STEP_SECONDS": "0.5"}) for name in ("left", "right")
    ]
    nodes = [set(job.wait(lambda job=job: job.events("allocated"), 600, "nodes")[0]["nodes"]) for job in jobs]
    if nodes[0] != nodes[1]:
        pytest.skip(f"Slurm gave the jobs different nodes: {nodes}")
    for job in jobs:
        assert job.wait_for_end()["kind"] == "done", job.story()
        assert job.decisions() == [("done", "done")]
        job.wait(lambda job=job: cluster.job_state(job.id) == "COMPLETED", 60, "its last process to leave")
    assert overlap(jobs[0], jobs[1]) > 0, "the jobs must have run at the same time"
    blocks = [{event["claim"] for event in job.events("ports")} for job in jobs]
    assert not blocks[0] & blocks[1], "each job has its own block of ports"
    assert foreign_ray() == before, "not one process of the foreign Ray was touched"
    for node in sorted(nodes[0]):
        left = cluster.on(node, "pgrep", "-af", "raylet|gcs_server|atlasrl", check=False).stdout
        assert not [line for line in left.splitlines() if "/tmp/foreign" not in line], left
        assert folders(cluster, node) <= left_before[node], "temporary folders are removed"


def folders(cluster, node: str) -> set[str]:
    """Temporary folders of jobs on a node."""
    return {name for name in cluster.on(node, "ls", "/tmp").stdout.split() if name.startswith("atlasrl-")}


def overlap(one, other) -> float:
    """Seconds in which both jobs had their Ray up."""
    spans = [(job.events("ray_up")[0]["time"], job.events("attempt_end")[-1]["time"]) for job in (one, other)]
    return min(end for _, end in spans) - max(begin for begin, _ in spans)
