"""`ckpt repair`: what it mends, what it refuses, that it can be undone, and that a crash leaves one of two states."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from defects import FIRST, INV_FREQ, edit_header, edit_shard, list_also, put, reindex
from defects import THIRD as LAST
from tiny_checkpoints import deepseek, read_weight_map, tree_bytes, write_index, write_shard

from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.repair import repair, undo
from ckpt_tools.repair_plan import Wishes, compile_patterns, plan_repair
from ckpt_tools.verify import verify


def mend(folder: Path, **wishes) -> tuple[str, ...]:
    plan = plan_repair(read_checkpoint(folder), Wishes(**wishes))
    repair(plan)
    return plan.changes


def damage_stale_key(folder: Path) -> None:
    """Report D1: the index lists a buffer that no shard holds."""
    list_also(folder, INV_FREQ)


def damage_unlisted_tensor(folder: Path) -> None:
    weight_map = read_weight_map(folder)
    del weight_map["model.norm.weight"]
    write_index(folder, weight_map, read_checkpoint(folder).nbytes)


def damage_total_size(folder: Path) -> None:
    """Report D6: layers stripped, total_size left."""
    write_index(folder, read_weight_map(folder), 1)


def damage_wrong_file(folder: Path) -> None:
    write_index(folder, read_weight_map(folder) | {"model.norm.weight": LAST}, read_checkpoint(folder).nbytes)


def damage_format(folder: Path) -> None:
    """Report D8: a shard without metadata."""
    edit_header(folder / FIRST, lambda header: header.pop("__metadata__") and None)


def damage_empty_shard(folder: Path) -> None:
    for number in (3, 2, 1):
        (folder / f"model-{number:05d}-of-000003.safetensors").rename(
            folder / f"model-{number + 1:05d}-of-000004.safetensors"
        )
    write_shard(folder / "model-00001-of-000004.safetensors", {})
    reindex(folder)


def damage_leftover_scales(folder: Path) -> None:
    edit_shard(folder, LAST, put("model.layers.2.self_attn.o_proj.weight_scale_inv", "F32", np.ones((2, 1), "<f4")))


def damage_lost_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


DAMAGES = [
    damage_stale_key,
    damage_unlisted_tensor,
    damage_total_size,
    damage_wrong_file,
    damage_format,
    damage_empty_shard,
    damage_leftover_scales,
    damage_lost_index,
]


@pytest.fixture
def folder(tmp_path):
    return deepseek(tmp_path / "model", fp8=False)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_repaired_checkpoint_is_clean_and_undo_restores_every_byte(folder, damage):
    damage(folder)
    before = tree_bytes(folder)
    assert verify(folder).findings, "the damage was not seen, so the repair would prove nothing"
    assert mend(folder, rebuild_index=True)
    assert verify(folder).findings == []
    undo(folder)
    assert tree_bytes(folder) == before


def test_a_repair_changes_no_tensor(folder):
    before = {name: tensor_data(folder, name) for name in read_checkpoint(folder).tensors()}
    damage_format(folder)
    damage_stale_key(folder)
    mend(folder)
    assert {name: tensor_data(folder, name) for name in read_checkpoint(folder).tensors()} == before


def tensor_data(folder: Path, name: str) -> bytes:
    checkpoint = read_checkpoint(folder)
    (file,) = checkpoint.locations()[name]
    header = checkpoint.headers[file]
    tensor = header.tensors[name]
    return header.path.read_bytes()[header.data_start + tensor.begin : header.data_start + tensor.end]


def test_two_repairs_are_undone_one_after_the_other(folder):
    states = [tree_bytes(folder)]
    mend(folder, drop=compile_patterns((r"layers\.2\.mlp\.experts\.3\.",)))
    states.append(tree_bytes(folder))
    mend(folder, drop_mtp=True)
    assert tree_bytes(folder) not in states
    for state in reversed(states):
        undo(folder)
        assert tree_bytes(folder) == state
    with pytest.raises(UsageFault, match="no repair to undo"):
        undo(folder)


def test_dropping_mtp_edits_shards_index_and_config_together(folder):
    """mbridge#119: MTP in the index while training has it off costs the whole shard."""
    mend(folder, drop_mtp=True)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not [name for name in read_checkpoint(folder).tensors() if ".layers.3." in name]
    assert verify(folder).findings == []


def test_shards_left_empty_are_removed_and_the_rest_numbered_again(folder):
    gone = "|".join(re.escape(name) for name, file in read_weight_map(folder).items() if file == LAST)
    mend(folder, drop=compile_patterns((gone,)))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"]
    assert set(read_weight_map(folder).values()) == set(shards)


def test_a_lost_weight_is_refused_and_nothing_changes(folder):
    write_index(folder, read_weight_map(folder) | {"model.layers.0.mlp.extra.weight": FIRST}, 1)
    before = tree_bytes(folder)
    with pytest.raises(Fault, match=r"mlp\.extra\.weight.*held by no shard"):
        mend(folder)
    assert tree_bytes(folder) == before


def test_the_lost_weight_goes_when_a_pattern_names_it(folder):
    write_index(folder, read_weight_map(folder) | {"model.layers.0.mlp.extra.weight": FIRST}, 1)
    mend(folder, drop=compile_patterns((r"mlp\.extra",)))
    assert verify(folder).findings == []


def test_a_kept_buffer_that_no_shard_holds_is_refused(folder):
    damage_stale_key(folder)
    with pytest.raises(Fault, match="held by no shard"):
        mend(folder, keep=compile_patterns(("inv_freq",)))


def test_a_dropped_buffer_can_be_spared_and_comes_back(folder):
    """Report D13: one loader demands inv_freq, another drops it; so dropping is chosen by name and can be undone."""
    other = INV_FREQ.replace("layers.1", "layers.2")
    for name in (INV_FREQ, other):
        edit_shard(folder, LAST, put(name, "F32", np.ones(8, "<f4")))
    before = tree_bytes(folder)
    mend(folder, drop=compile_patterns(("inv_freq",)), keep=compile_patterns((r"layers\.1\.",)))
    assert {name for name in read_weight_map(folder) if "inv_freq" in name} == {INV_FREQ}
    undo(folder)
    assert tree_bytes(folder) == before


def test_a_mapped_file_keeps_its_bytes_while_the_checkpoint_is_repaired(folder):
    """Report D14: a save over a file that is mapped as the source of the data corrupts both."""
    damage_format(folder)
    before = (folder / FIRST).read_bytes()
    mapped = np.memmap(folder / FIRST, np.uint8, "r")
    mend(folder)
    assert (folder / FIRST).read_bytes() != before
    assert mapped.tobytes() == before


def test_an_index_is_not_rebuilt_when_a_numbered_shard_is_missing(folder):
    damage_lost_index(folder)
    (folder / LAST).unlink()
    with pytest.raises(Fault, match="none is missing"):
        mend(folder, rebuild_index=True)


def test_a_truncated_shard_is_refused(folder):
    path = folder / FIRST
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(Fault, match="truncated"):
        mend(folder)


def test_undo_refuses_to_lose_a_file_that_came_later(folder):
    damage_format(folder)
    mend(folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageFault, match=r"notes\.txt came after the repair"):
        undo(folder)
    assert (folder / "notes.txt").read_text() == "mine"


def test_repair_into_another_folder_leaves_the_source_alone(folder, tmp_path):
    damage_format(folder)
    before = tree_bytes(folder)
    repair(plan_repair(read_checkpoint(folder), Wishes()), tmp_path / "mended")
    assert tree_bytes(folder) == before
    assert verify(tmp_path / "mended").findings == []


CRASHING = """
import os, signal, sys
from pathlib import Path
import ckpt_tools.repair as r
from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.repair_plan import Wishes, plan_repair
left = int(sys.argv[2])
def trace(event, arguments):
    global left
    if event in ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "ctypes.dlsym"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
plan = plan_repair(read_checkpoint(Path(sys.argv[1])), Wishes())
sys.addaudithook(trace)
r.repair(plan) if sys.argv[3] == "repair" else r.undo(Path(sys.argv[1]))
"""


def run_and_kill(folder: Path, operations: int, act: str) -> bool:
    """Run a repair or undo and kill it with -9 before its Nth file operation; False when it ended before that."""
    command = [sys.executable, "-c", CRASHING, str(folder), str(operations), act]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}).returncode == -signal.SIGKILL


@pytest.mark.verl
@pytest.mark.parametrize("damage", [damage_stale_key, damage_format], ids=["one file", "folders exchanged"])
def test_a_killed_repair_leaves_the_old_state_or_the_new_one(tmp_path, damage):
    whole = deepseek(tmp_path / "whole", fp8=False)
    damage(whole)
    before = tree_bytes(whole)
    mend(whole)
    after = tree_bytes(whole)
    operations, seen = 0, set()
    while True:
        folder = deepseek(tmp_path / f"try{operations}", fp8=False)
        damage(folder)
        killed = run_and_kill(folder, operations, "repair")
        state = tree_bytes(folder)
        assert state in (before, after)
        seen.add(state == after)
        mend(folder)
        undo(folder)
        assert tree_bytes(folder) == before
        if not killed:
            break
        operations += 3
    assert operations > 3
    assert seen == {True, False}


@pytest.mark.verl
def test_a_killed_undo_leaves_the_old_state_or_the_new_one_and_can_be_finished(tmp_path):
    operations, seen = 0, set()
    while True:
        folder = deepseek(tmp_path / f"try{operations}", fp8=False)
        damage_format(folder)
        before = tree_bytes(folder)
        mend(folder)
        after = tree_bytes(folder)
        killed = run_and_kill(folder, operations, "undo")
        state = tree_bytes(folder)
        assert state in (before, after)
        seen.add(state == after)
        if state == after:
            undo(folder)
        mend(folder)
        assert tree_bytes(folder) == after
        assert [path.name for path in tmp_path.glob(".*")] == []
        if not killed:
            break
        operations += 3
    assert operations > 3
    assert seen == {True, False}
