"""One real Slurm cluster for all cluster tests of a session."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import cluster as clusters


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    if shutil.which("slurmctld") is None:
        subprocess.run([str(Path(__file__).parent / "install.sh")], check=True)


@pytest.fixture(scope="session")
def running_cluster(slurm_installed):
    """Four nodes with their own addresses and host names, where this machine allows it."""
    with clusters.running(nodes=4) as running:
        yield running


@pytest.fixture
def cluster(running_cluster):
    """The cluster with no job on it, before a test and after it, however the test ended."""
    yield running_cluster
    running_cluster.end_jobs()


def pytest_collection_modifyitems(items) -> None:
    """A job of several nodes shares two cores with whatever else runs here; its own waits have deadlines."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(1800))
