"""Bare metal without a scheduler: real ssh servers on emulated hosts."""

import json
import sys

import pytest
import sshd

from atlasrl.rundir import RunDir
from jobs import command, train

pytestmark = pytest.mark.cluster


@pytest.fixture
def hosts(cluster):
    """A site of kind ssh on the nodes of the cluster; Slurm is not used."""
    if cluster.facts["mode"] != "namespaces":
        pytest.skip("ssh servers need hosts of their own")
    options = sshd.start(cluster)
    return {
        "kind": "ssh",
        "slurm": None,
        "ssh": {"hosts": list(cluster.nodes), "options": options},
        "setup": [f"export ATLASRL_REAL_PYTHON={sys.executable}"],
    }


def test_a_job_outlives_its_connection_loses_a_host_and_goes_on_with_a_spare(cluster, hosts):
    job = train(cluster, "bare", nodes=2, site=hosts, steps=300, environment={"LIGHT_STEP_SECONDS": "0.2"})
    job.wait_for_checkpoint(1)
    assert cluster.on("login", "pgrep", "-x", "ssh", check=False).returncode, "no ssh connection holds the job"
    told = json.loads(command(cluster, "status", "bare", "--json").stdout)[0]
    assert told["state"] == "running" and told["job"] == job.id

    cluster.on("node02", "pkill", "-9", "-f", "raylet/raylet")
    assert job.wait_for_decision(1)["action"] == "restart"
    job.wait_for_step(max(job.steps()) + 2)

    command(cluster, "stop", "bare", "--save")
    assert job.wait_for_end()["kind"] == "stopped"
    done = max(job.steps())
    cluster.power_off("node02")
    try:
        command(cluster, "resume", job.id)
        job.wait_for_step(done + 2)
        assert job.events("allocated")[-1]["nodes"] == ["node01", "node03"]
        assert "node02" in job.events("hosts")[-1]["unfit"][0]
        command(cluster, "stop", "bare")
    finally:
        cluster.boot("node02")
    assert sorted(set(job.steps())) == list(range(1, max(job.steps()) + 1))


def test_unfit_hosts_are_named_and_nothing_is_started(cluster, hosts):
    hosts["ssh"]["hosts"] = ["node01", "node99"]
    with pytest.raises(AssertionError, match=r"2 hosts are needed and 1 of 2 are fit: node99: ssh: .*node99"):
        train(cluster, "unfit", nodes=2, site=hosts)
    assert cluster.on("node01", "pgrep", "-f", "runs/unfit/ssh", check=False).returncode


def test_only_processes_of_ours_are_signalled(cluster, hosts, tmp_path):
    """A pid that came back as somebody else's process must stay alone."""
    cluster.on("node01", "bash", "-c", "sleep 300 >/dev/null 2>&1 </dev/null & echo $! >/tmp/pid")
    pid = cluster.on("node01", "cat", "/tmp/pid").stdout.strip()
    run = RunDir(cluster.shared / "not-ours")
    (run.path / "ssh").mkdir(parents=True, exist_ok=True)
    record = {"ssh": hosts["ssh"], "tasks": [{"host": "node01", "pid": pid, "started": "12345"}]}
    (run.path / "ssh" / "ssh-0_tasks.json").write_text(json.dumps(record))
    script = (
        "from atlasrl.launch import ssh; from atlasrl.rundir import RunDir; "
        f"print(ssh._tell(RunDir({str(run.path)!r}), 'ssh-0', ssh.TERMINATE))"
    )
    assert "gone" in cluster.login(sys.executable, "-c", script, PYTHONPATH="pylib").stdout
    assert cluster.on("node01", "kill", "-0", pid).returncode == 0
