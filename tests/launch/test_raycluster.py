"""What a node does for its Ray beside starting it. Ray itself: tests/job/test_life.py and tests/cluster."""

import os
import subprocess
import sys

from atlasrl import plan, raycluster
from tests.job.conftest import wait_until

RAY = """
from pathlib import Path

def init(*_, **__):
    first = Path(__file__).with_name("asked")
    if not first.exists():
        first.touch()
        raise ConnectionError("no node")

def nodes():
    return [{"NodeName": "node0", "Alive": True, "Resources": {"NPU": 8.0, "node:10.0.0.1": 1.0}},
            {"NodeName": "node1", "Alive": False, "Resources": {}}]
"""


def test_only_folders_that_nobody_uses_are_swept(tmp_path):
    left, used, elsewhere, link = (tmp_path / name for name in ("left", "used", "elsewhere", "link"))
    for folder in (left, used, elsewhere):
        (folder / "0" / "session").mkdir(parents=True)
    link.symlink_to(elsewhere)
    raylet = subprocess.Popen([sys.executable, "-c", "input()", f"--temp-dir={used}/0"], stdin=subprocess.PIPE)
    try:
        raycluster.sweep([left, used, link, tmp_path / "never-made"])
        assert not left.exists()
        assert (used / "0" / "session").exists()
        assert link.is_symlink() and (elsewhere / "0" / "session").exists()
    finally:
        raylet.communicate(b"\n")
    raycluster.sweep([used])
    assert not used.exists()


def test_a_probe_that_gave_up_before_ray_was_up_is_started_again(tmp_path):
    """The head's raylet may fail to come up in Ray's 30 s and be tried again; the probe waits less."""
    (tmp_path / "ray.py").write_text(RAY)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{plan.ROOT / 'pylib'}"}
    watch = raycluster.Watch("10.0.0.1:6379", env, tmp_path / "log")
    try:
        wait_until(lambda: watch.look() or watch.alive, 30, "the second probe")
        assert watch.alive == {"node0": {"NPU": 8.0}}
        assert "ConnectionError: no node" in (tmp_path / "log").read_text()
    finally:
        watch.close()
