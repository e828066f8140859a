"""The test cluster is a cluster, and leaves nothing behind."""

from pathlib import Path

import cluster as clusters
import machines
import psutil
import pytest

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("mode", ["namespaces", "loopback"])
def test_jobs_run_on_every_node_and_nothing_is_left(slurm_installed, mode):
    if mode == "namespaces" and not machines.possible():
        pytest.skip("this user may not make namespaces")
    before = {process.pid for process in psutil.process_iter()}
    with clusters.running(2, mode) as cluster:
        named = cluster.login("srun", "--nodes=2", "bash", "-c", "echo $SLURMD_NODENAME $(hostname)").stdout.split()
        assert set(named[::2]) == {"node01", "node02"}
        if mode == "namespaces":
            assert named[::2] == named[1::2], "each node has its own host name"
        cluster.login("sbatch", "--nodes=1", "--output=/dev/null", "--wrap=sleep 1000")
        cluster.wait_for(lambda: cluster.job_state("2") == "RUNNING", 20, "the job to run")
    left = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    assert not [process for process in left if str(cluster.folder) in " ".join(process.info["cmdline"] or [])]
    assert not [process for process in left if "sleep 1000" in " ".join(process.info["cmdline"] or [])]
    assert not cluster.folder.exists()


@pytest.mark.nightly  # test_job_life.py loses two
def test_a_node_can_lose_its_power_and_come_back(cluster):
    if cluster.facts["mode"] != "namespaces":
        pytest.skip("loopback nodes share one machine")
    marker = Path("/tmp/only-on-node02")
    cluster.on("node02", "touch", marker)
    assert not marker.exists() and cluster.on("node01", "ls", marker, check=False).returncode
    cluster.power_off("node02")
    cluster.wait_for(
        lambda: "down" in cluster.login("sinfo", "--noheader", "--nodes=node02", "--format=%T").stdout,
        40,
        "Slurm to notice",
    )
    cluster.boot("node02")
    cluster.wait_for(
        lambda: cluster.login("sinfo", "--noheader", "--nodes=node02", "--format=%T").stdout.strip() == "idle",
        40,
        "node02",
    )
    assert cluster.on("node02", "ls", marker, check=False).returncode, "a booted machine starts with an empty /tmp"
