"""The precision tests use the small model and prompts of the trainer tests, and plant the faults of `planted`."""

import os
import sys
from pathlib import Path

import pytest

PLANTED = Path(__file__).parent / "planted"
sys.path += [str(Path(__file__).parents[1] / "trainer"), str(PLANTED)]


@pytest.fixture(scope="module")
def three_devices():
    """A Ray of three devices whose workers can import the planted faults; its connection."""
    ray = pytest.importorskip("ray")
    from atlasrl.precision.fleet import PYLIB

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_worker_niceness", "0")
        yield ray.init(
            "local",
            num_cpus=16,
            resources={"NPU": 3},
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": f"{PYLIB}{os.pathsep}{PLANTED}", "OMP_NUM_THREADS": "1"}},
        )
        ray.shutdown()
