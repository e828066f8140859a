"""The 671B recipe from a login node: submitted, started on every node, stopped by preflight with what is missing."""

from __future__ import annotations

import cluster as clusters
import pytest

import jobs
from jobs import Job

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

LARGE = "deepseek-v3-671b-dapo"
QUARTER = (  # of the devices: the same recipe with fewer stages
    *("parallel.pipeline=4", "parallel.first_stage_layers=16", "parallel.last_stage_layers=15"),
    *("parallel.expert=8", "rollout.expert=32"),
)


DEVICES = """
set -e
mkdir /run/dev; mount --rbind /dev /run/dev; mount -t tmpfs devices /dev
ln -s /run/dev/* /dev/; touch /dev/davinci{0..7}
"""
"""A /dev of the machine's own with empty device files; the check-in of a job counts them."""


def plug_in_devices(cluster: clusters.Cluster) -> None:
    if not cluster.facts["firsts"]:
        pytest.skip("the nodes of a loopback cluster have this machine's own /dev")
    for node in cluster.nodes:
        cluster.on(node, "bash", "-c", f"[ -e /dev/davinci0 ] || {{ {DEVICES} }}")


def submit(cluster: clusters.Cluster, nodes: int, *changes: str) -> Job:
    """The recipe with a model folder and a data file that are there and hold nothing."""
    plug_in_devices(cluster)
    model, train = cluster.shared / "DeepSeek-V3", cluster.shared / "train.parquet"
    model.mkdir(exist_ok=True)
    train.touch()
    paths = (f"model.path={model}", f"data.train={train}", f"data.val={train}")
    options = [word for change in (*paths, *changes) for word in ("--set", change)]
    name = f"large-{nodes}"
    return jobs.submit(cluster, LARGE, name, nodes, jobs.site_file(cluster, name, False, {}), *options)


def check_stopped_at_preflight(job: Job, nodes: int) -> None:
    end = job.wait_for_end(900)
    assert (end["kind"], end["action"]) == ("wrong", "stop"), job.story()
    reached = {event["node"] for event in job.events("stage_start") if event["stage"] == "preflight"}
    assert reached == {f"node{rank}" for rank in range(nodes)}, job.story()
    assert not [event for event in job.events("stage_start") if event["stage"] in ("cast", "train")]
    attempt = job.run.attempts()[-1]
    said = (attempt.logs / "preflight-node0.log").read_text()
    for missing in ("npu-smi: not installed", "CANN: its environment is not sourced", "model: ", "data: "):
        assert f"error: {missing}" in said, said
    assert "stage preflight failed" in attempt.ending()["message"]


def test_the_large_recipe_goes_to_preflight_on_four_nodes_and_is_told_what_is_missing(cluster):
    check_stopped_at_preflight(submit(cluster, 4, *QUARTER), 4)


def test_the_large_recipe_goes_to_preflight_on_32_nodes(slurm_installed):
    with clusters.running(nodes=32) as cluster:
        check_stopped_at_preflight(submit(cluster, 32), 32)
