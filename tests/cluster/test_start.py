"""What is wrong on one node is said in the first lines, with the node's name, before anything long starts."""

import sys
from pathlib import Path

import pytest

from jobs import train

pytestmark = pytest.mark.cluster
QUICK = {"ray": {"deadline": 20, "deadline_per_node": 1}}


@pytest.fixture
def own_hosts(cluster):
    if cluster.facts["mode"] != "namespaces":
        pytest.skip("loopback nodes share their files and interfaces")
    return cluster


def first_words(job, number: int = 1) -> str:
    return job.wait_for_decision(number, 240)["message"]


def test_a_node_without_the_shared_folder_is_named(own_hosts):
    own_hosts.on("node02", "mount", "-t", "tmpfs", "tmpfs", own_hosts.shared)
    try:
        job = train(own_hosts, "unshared", nodes=4, site=QUICK)
        log = job.run.path / "slurm" / f"{job.id}_0_log.out"
        job.wait(lambda: job.cluster.job_state(job.id) == "FAILED", 240, "the canary to end the job")
        assert f"error: node02: does not see {job.run.path}/slurm; mount the shared filesystem" in log.read_text()
        assert not job.events("allocated"), "nothing was started"
    finally:
        own_hosts.on("node02", "umount", own_hosts.shared)


def test_a_node_with_another_environment_and_one_without_the_interface_are_named_together(own_hosts):
    metadata = next(Path(sys.prefix).glob("lib/python3*/site-packages/safetensors-*.dist-info/METADATA"))
    other = own_hosts.shared / "METADATA"
    other.write_text(metadata.read_text().replace("\nVersion: ", "\nVersion: 9."))
    own_hosts.on("node02", "mount", "--bind", other, metadata)
    own_hosts.on("node03", "ip", "link", "set", "eth0", "alias", "was-eth0")
    own_hosts.on("node03", "bash", "-c", "ip link set eth0 down && ip link set eth0 name ib0 && ip link set ib0 up")
    try:
        job = train(own_hosts, "different", nodes=4, site=QUICK)
        words = first_words(job)
        assert "node02: its environment differs from node01's: package safetensors is '9." in words
        assert "node03: no network interface eth0; it has ib0, lo; set nic in the site file" in words
        assert job.decisions() == [("wrong", "stop")]
        assert not job.events("attempt_start"), "no Ray, no trainer"
    finally:
        own_hosts.on("node02", "umount", metadata)
        own_hosts.on("node03", "bash", "-c", "ip link set ib0 down && ip link set ib0 name eth0 && ip link set eth0 up")


def test_a_node_whose_task_never_starts_is_named_within_the_deadline(own_hosts):
    """node04 accepts the task and then hangs in the interpreter, as on a dead filesystem."""
    hanging = own_hosts.shared / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 300\n")
    hanging.chmod(0o755)
    light = Path(__file__).parent / "light_python"
    own_hosts.on("node04", "mount", "--bind", hanging, light)
    try:
        job = train(own_hosts, "hanging", nodes=4, site=QUICK)
        assert "3/4 nodes answered within 23 s; missing: node04" in first_words(job)
        assert job.decisions()[0] == ("node failure", "requeue")
    finally:
        own_hosts.login("scancel", job.id)
        own_hosts.on("node04", "umount", light)


@pytest.mark.nightly
def test_nothing_of_it_spoils_the_next_job(own_hosts):
    job = train(own_hosts, "after", nodes=4, steps=2)
    assert job.wait_for_end()["kind"] == "done"
