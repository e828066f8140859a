"""Attacks on the question "which checkpoint may be loaded, and which may be removed"."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from atlasrl import checkpoints
from atlasrl.errors import Fault
from atlasrl.recipe import parse
from atlasrl.rundir import RunDir
from atlasrl.trainer import saving


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "runs" / "r")
    run.checkpoints.mkdir(parents=True)
    return run


def written(run: RunDir, step: int, size: int = 10) -> Path:
    """What verl leaves behind before we seal it."""
    path = checkpoints.folder(run, step)
    (path / "actor").mkdir(parents=True)
    (path / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"m" * size)
    (path / "data.pt").write_bytes(b"d" * size)
    return path


def sealed(run: RunDir, step: int, **facts) -> checkpoints.Checkpoint:
    return checkpoints.seal(written(run, step), **{"backend": "fsdp2", "world_size": 1, **facts})


def steps(found) -> list[int]:
    return [entry.step for entry in found]


def test_newest_complete_wins_over_a_newer_half_written_one(run):
    sealed(run, 5)
    sealed(run, 10)
    written(run, 15)
    assert checkpoints.choose(run).step == 10
    assert steps(checkpoints.complete(run)) == [10, 5]


def test_steps_are_ordered_as_numbers(run):
    sealed(run, 9)
    sealed(run, 10)
    assert checkpoints.choose(run).step == 10


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: (p / "data.pt").unlink(), "data.pt is missing"),
        (lambda p: (p / "data.pt").write_bytes(b"d"), "data.pt has 1 bytes instead of 10"),
        (lambda p: (p / "COMPLETE").write_text("{"), "manifest is damaged"),
        (lambda p: (p / "COMPLETE").write_text("[]"), "manifest is damaged"),
        (lambda p: (p / "COMPLETE").write_text('{"step": 10, "files": {"a": "b"}}'), "manifest is damaged"),
        (lambda p: (p / "COMPLETE").unlink(), "half-written"),
        (lambda p: (p / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b""), "has 0 bytes instead of 10"),
    ],
)
def test_damage_of_any_kind_disqualifies_and_is_named(run, damage, says):
    sealed(run, 5)
    damage(sealed(run, 10).path)
    assert checkpoints.choose(run).step == 5
    with pytest.raises(Fault, match="no complete checkpoint of step 10") as told:
        checkpoints.choose(run, 10)
    assert says in str(told.value)
    assert "complete: 5" in str(told.value)


def test_a_manifest_copied_from_another_step_is_not_believed(run):
    sealed(run, 5)
    shutil.copytree(checkpoints.folder(run, 5), checkpoints.folder(run, 50))
    assert checkpoints.choose(run).step == 5
    assert "manifest is that of step 5" in "; ".join(checkpoints.explain(run))


def test_a_manifest_cannot_vouch_for_files_outside_its_folder(run, tmp_path):
    (tmp_path / "outside").write_bytes(b"x" * 10)
    path = sealed(run, 5).path
    manifest = json.loads((path / "COMPLETE").read_text())
    manifest["files"] = {"../../../../outside": 10}
    (path / "COMPLETE").write_text(json.dumps(manifest))
    assert checkpoints.complete(run) == []


@pytest.mark.parametrize(
    ("tracker", "says"),
    [
        ("", "tracker is empty"),
        ("40", "points to step 40, which does not exist"),
        ("5", "says step 5, the newest complete checkpoint is step 10"),
        ("ten", "tracker is damaged"),
    ],
)
def test_the_tracker_is_explained_but_never_believed(run, tracker, says):
    sealed(run, 5)
    sealed(run, 10)
    (run.checkpoints / checkpoints.TRACKER).write_text(tracker)
    assert checkpoints.choose(run).step == 10
    assert says in "; ".join(checkpoints.explain(run))


def test_nothing_to_resume_says_what_is_there(run):
    written(run, 3)
    (run.checkpoints / checkpoints.TRACKER).write_text("3")
    with pytest.raises(Fault, match=r"global_step_3: half-written.*nothing to resume from"):
        checkpoints.choose(run)


def test_nothing_at_all_is_one_line(tmp_path):
    with pytest.raises(Fault, match="the folder is empty") as told:
        checkpoints.choose(RunDir(tmp_path / "none"))
    assert "\n" not in str(told.value)


def test_sealing_needs_every_worker_s_file(run):
    path = written(run, 5)
    with pytest.raises(Fault, match=r"lacks actor/extra_state_world_size_2_rank_0.pt.*nodes share"):
        checkpoints.seal(path, required=saving.required_files("fsdp2", 2))
    assert checkpoints.complete(run) == []


def test_pruning_keeps_the_newest_and_never_the_last_goes(run):
    for step in (5, 10, 15):
        sealed(run, step)
    checkpoints.prune(run, keep=2)
    assert steps(checkpoints.complete(run)) == [15, 10]
    checkpoints.prune(run, keep=0)
    assert steps(checkpoints.complete(run)) == [15]


def test_pruning_removes_old_ruins_but_not_a_save_in_progress(run):
    written(run, 5)
    sealed(run, 10)
    written(run, 15)
    checkpoints.prune(run, keep=3)
    assert not checkpoints.folder(run, 5).exists()
    assert checkpoints.folder(run, 15).exists()


def test_pruning_removes_nothing_while_nothing_is_complete(run):
    written(run, 5)
    written(run, 10)
    assert checkpoints.prune(run, keep=1) == []
    assert checkpoints.folder(run, 5).exists()


def test_pruning_follows_no_link(run, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    checkpoints.folder(run, 1).symlink_to(precious)
    inside = written(run, 2)
    (inside / "link").symlink_to(precious)
    sealed(run, 5)
    sealed(run, 10)
    checkpoints.prune(run, keep=1)
    assert (precious / "file").read_text() == "x"
    assert checkpoints.folder(run, 1).is_symlink()
    assert not inside.exists()


def test_pruning_ignores_strangers(run):
    stranger = run.checkpoints / "global_step_5_backup"
    stranger.mkdir()
    sealed(run, 10)
    sealed(run, 15)
    checkpoints.prune(run, keep=1)
    assert stranger.exists()


def test_no_room_is_refused_before_anything_is_written(run, monkeypatch):
    path = checkpoints.seal(written(run, 5, size=1000), backend="fsdp2").path
    usage = shutil.disk_usage(run.checkpoints)._replace(free=2399)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(Fault, match=r"needs 2400 bytes .* has 2399 free"):
        checkpoints.check_room(run)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage._replace(free=2400))
    checkpoints.check_room(run)
    assert checkpoints.verify(path).step == 5


RECIPE = {"backend": "fsdp2", "model": {"path": "/m"}, "data": {"train": "/t"}, "checkpoint": {"keep": 1}}


def recipe(**changes):
    return parse({**RECIPE, **changes}, "test")


def save(run, step, write, world_size=1):
    saving.save(run, recipe(), step=step, world_size=world_size, prompts={"epoch": 0}, write=write)


def write_all(run, step):
    def write():
        path = written(run, step)
        for part in ("optim", "extra_state"):
            (path / "actor" / f"{part}_world_size_1_rank_0.pt").write_bytes(b"o")

    return write


def test_a_save_is_sealed_tracked_pruned_and_journalled(run):
    save(run, 5, write_all(run, 5))
    save(run, 10, write_all(run, 10))
    assert steps(checkpoints.complete(run)) == [10]
    assert (run.checkpoints / checkpoints.TRACKER).read_text() == "10"
    events = [(e["event"], e["step"], e["removed"]) for e in run.events()]
    assert events == [("checkpoint", 5, []), ("checkpoint", 10, ["global_step_5"])]
    assert checkpoints.choose(run).manifest["prompts"] == {"epoch": 0}


def test_a_full_disk_costs_the_half_written_folder_only(run):
    save(run, 5, write_all(run, 5))

    def disk_full():
        written(run, 10)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(Fault, match=r"disk filled up .* step 10 .* newest complete checkpoint is step 5"):
        save(run, 10, disk_full)
    assert not checkpoints.folder(run, 10).exists()
    assert checkpoints.choose(run).step == 5


def test_any_other_error_of_a_save_is_not_called_a_full_disk(run):
    def broken():
        raise ValueError("shape mismatch")

    with pytest.raises(ValueError, match="shape mismatch"):
        save(run, 5, broken)


def test_a_ruin_in_the_way_of_a_save_is_replaced(run):
    written(run, 5, size=99)
    save(run, 5, write_all(run, 5))
    assert checkpoints.choose(run).manifest["files"]["data.pt"] == 10


def test_starting_over_a_checkpoint_is_refused(run):
    sealed(run, 5)
    with pytest.raises(Fault, match=r"complete checkpoint of step 5 .* not told to resume"):
        saving.check_start(run, recipe(), None, 1)


def test_resume_from_a_ruin_is_refused(run):
    sealed(run, 5)
    with pytest.raises(Fault, match=r"half-written.*step 5 is complete"):
        saving.check_start(run, recipe(), written(run, 10), 1)


def test_after_going_back_the_abandoned_course_is_neither_newest_nor_lost(run):
    """Else the abandoned step 10 would be resumed next, and new checkpoints pruned as older than it."""
    old = sealed(run, 5)
    sealed(run, 10)
    saving.check_start(run, recipe(), old.path, 1)
    save(run, 6, write_all(run, 6))
    assert checkpoints.choose(run).step == 6
    assert [p.name[:24] for p in run.checkpoints.glob("superseded*")] == ["superseded_global_step_1"]


def test_another_number_of_workers_is_refused_for_fsdp2_only(run):
    path = sealed(run, 5).path
    with pytest.raises(Fault, match="shards of 1 workers, this run has 2"):
        saving.check_start(run, recipe(), path, 2)
    assert saving.check_start(run, recipe(), path, 1) == 5
    megatron = sealed(run, 10, backend="megatron").path
    assert saving.check_start(run, recipe(backend="megatron"), megatron, 4) == 10


def test_another_backend_is_refused(run):
    path = sealed(run, 5).path
    with pytest.raises(Fault, match="written by backend fsdp2, this run uses megatron"):
        saving.check_start(run, recipe(backend="megatron"), path, 1)
