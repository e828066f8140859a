"""A cast spread over a Ray cluster: every shard once, on several nodes, the same bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import deepseek, tree_bytes

from ckpt_tools.cast import cast

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def address():
    """Two Ray nodes of one CPU each, ours alone."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        try:
            cluster.add_node(num_cpus=1)
        except Exception:  # Ray gives a node 30 s to start, which a loaded machine may exceed once
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes(timeout=180)
        yield cluster.address
    finally:
        cluster.shutdown()


def run(source: Path, target: Path, address: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ckpt_tools", "cast", str(source), str(target), "--mtp", "drop", "--ray", "--json"]
    environment = os.environ | {"RAY_ADDRESS": address}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.cluster
def test_each_shard_is_cast_by_one_task_and_the_bytes_are_the_same(tmp_path, address):
    source = deepseek(tmp_path / "fp8", shards=9)
    done = run(source, tmp_path / "spread", address)
    assert done.returncode == 0, done.stderr
    cast(source, tmp_path / "alone", mtp="drop")
    assert tree_bytes(tmp_path / "spread") == tree_bytes(tmp_path / "alone")
    result = json.loads(done.stdout)
    records = [json.loads(p.read_text()) for p in (tmp_path / "spread" / ".ckpt" / "cast").iterdir()]
    assert result["written"] == result["shards"] == len(records)
    assert len({record["pid"] for record in records}) == 2, "both nodes worked"


@pytest.mark.cluster
def test_a_failing_shard_ends_the_cast_with_its_own_message(tmp_path, address):
    import numpy as np
    from defects import FIRST, edit_shard, put

    source = deepseek(tmp_path / "fp8")
    edit_shard(source, FIRST, put("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", np.zeros((2, 2), "<f4")))
    done = run(source, tmp_path / "spread", address)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if not line.startswith("cast: ")]  # of a busy machine: progress
    assert len(errors) == 1 and "the scale of block [0, 0]" in errors[0], done.stderr


@pytest.mark.cluster
def test_no_cluster_is_one_line_and_an_exit_code(tmp_path):
    source = deepseek(tmp_path / "fp8")
    done = run(source, tmp_path / "spread", "127.0.0.1:1")
    assert done.returncode == 1
    assert "no Ray cluster answers" in done.stderr.splitlines()[-1]
