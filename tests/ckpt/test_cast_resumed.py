"""`ckpt cast` interrupted, repeated, in several processes: always the same bytes, and never twice the work."""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from defects import FIRST, SECOND, edit_shard, reindex
from test_cast import ROOT, assert_cast
from tiny_checkpoints import deepseek, tree_bytes

from ckpt_tools.cast import cast
from ckpt_tools.errors import UsageFault
from ckpt_tools.verify import verify


def test_a_finished_cast_is_recognised_and_a_changed_one_is_made_good(tmp_path):
    source, target = deepseek(tmp_path / "fp8"), tmp_path / "bf16"
    assert not cast(source, target).already
    whole = tree_bytes(target)
    assert cast(source, target).already
    data = bytearray((target / SECOND).read_bytes())
    data[-1] ^= 1
    (target / SECOND).write_bytes(data)
    again = cast(source, target)
    assert (again.written, again.proven) == (1, 2)
    assert tree_bytes(target) == whole


def test_a_changed_source_makes_its_shards_be_cast_again(tmp_path):
    source, target = deepseek(tmp_path / "fp8"), tmp_path / "bf16"
    cast(source, target)
    edit_shard(source, FIRST, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"]}))
    reindex(source)
    assert cast(source, target).written >= 1
    assert_cast(source, target)


@pytest.mark.verl
def test_workers_give_the_same_bytes(tmp_path):
    source = deepseek(tmp_path / "fp8")
    cast(source, tmp_path / "one")
    seen = []
    cast(source, tmp_path / "two", workers=2, progress=lambda done, total: seen.append((done, total)))
    assert tree_bytes(tmp_path / "one") == tree_bytes(tmp_path / "two")
    assert seen[-1][0] == seen[-1][1]


def test_two_casts_into_one_folder_do_not_mix(tmp_path):
    from ckpt_tools.files import exclusive

    source, target = deepseek(tmp_path / "fp8"), tmp_path / "bf16"
    cast(source, target)
    with exclusive(target), pytest.raises(UsageFault, match="being changed by another"):
        cast(source, target)


@pytest.mark.verl
def test_killed_at_random_points_and_resumed_the_result_is_the_same(tmp_path):
    """Issue: killed 20 times with -9 and resumed, bit-identical, and never a folder that looks finished but is not."""
    source, target = deepseek(tmp_path / "fp8", shards=6), tmp_path / "bf16"
    cast(source, tmp_path / "whole", mtp="drop")
    whole = tree_bytes(tmp_path / "whole")
    context = get_context("forkserver")
    context.set_forkserver_preload(["ckpt_tools.cast", "warm_kernels"])
    dice, killed = random.Random(7), 0
    while killed < 20:
        shutil.rmtree(target, ignore_errors=True)
        process = context.Process(target=cast, args=(source, target), kwargs={"mtp": "drop"})
        process.start()
        wait_for_shards(process.join, target, dice.randrange(0, 6))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        if (target / "model.safetensors.index.json").exists():
            assert verify(target).findings == []
        cast(source, target, mtp="drop")
        assert tree_bytes(target) == whole


def wait_for_shards(wait: Callable[[float], object], target: Path, count: int) -> None:
    """Wait until so many shards are done, or the cast has ended; `wait` waits for its end for some seconds."""
    deadline = time.monotonic() + 60
    while len(list(target.glob("*.safetensors"))) < count and not (target / "config.json").exists():
        assert time.monotonic() < deadline, f"{count} shards did not appear"
        wait(0.002)


@pytest.mark.verl
def test_workers_die_with_a_killed_parent(tmp_path):
    source, target = deepseek(tmp_path / "fp8", shards=12), tmp_path / "bf16"
    command = [sys.executable, "-m", "ckpt_tools", "cast", str(source), str(target), "--workers", "2"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)

    def wait(seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)

    wait_for_shards(wait, target, 1)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while members := [p for p in Path("/proc").glob("[0-9]*") if session_of(p) == process.pid]:
        assert time.monotonic() < deadline, f"still alive: {members}"
    cast(source, target, workers=2)
    assert_cast(source, target)


def session_of(process: Path) -> int | None:
    """The session of a live process, None when it is gone or a zombie."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])
