"""`ckpt cast`: bit-identical to the reference formula, refuses before it writes, survives being killed."""

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from defects import FIRST, SECOND, SEEDED_FP8, edit_all, edit_config, edit_shard, list_also, put, reindex, rename_where
from safetensors.torch import load_file
from tiny_checkpoints import deepseek, read_weight_map, tree_bytes, write_index

from ckpt_tools.cast import cast
from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.verify import verify

ROOT = Path(__file__).resolve().parents[2]
SCALE = "_scale_inv"


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by the safetensors library."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def dequantised(weight: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """DeepSeek's formula element by element: bfloat16(float32(weight) * scale[i // block, j // block])."""
    i, j = torch.meshgrid(torch.arange(weight.shape[0]), torch.arange(weight.shape[1]), indexing="ij")
    return (weight.float() * scale.float()[i // block, j // block]).to(torch.bfloat16)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_cast(source: Path, target: Path, left_out: str = "no such") -> None:
    before, after = load(source), load(target)
    expected = {n: t for n, t in before.items() if not n.endswith(SCALE) and left_out not in n}
    assert after.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = dequantised(tensor, before[name + SCALE])
        assert after[name].dtype == tensor.dtype, name
        assert bits(after[name]) == bits(tensor), name


def test_the_result_is_the_reference_formula_bit_for_bit(tmp_path):
    """Also PAINS E5 and E7: rows that are no multiple of 128, and the F32 router bias stays F32."""
    source = deepseek(tmp_path / "fp8")
    result = cast(source, tmp_path / "bf16")
    assert_cast(source, tmp_path / "bf16")
    kinds = {t.dtype for n, t in load(tmp_path / "bf16").items() if n.endswith("correction_bias")}
    assert kinds == {torch.float32}
    assert any(t.shape[0] % 128 for t in read_checkpoint(source).tensors().values() if t.dtype == "F8_E4M3")
    assert result.checked == len(load(tmp_path / "bf16"))
    assert verify(tmp_path / "bf16").findings == []


def test_all_256_codes_and_scales_of_every_size_are_cast_as_torch_does(tmp_path):
    from ckpt_tools.kernels import dequantise_into

    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(64, 0)
    scales = (10.0 ** np.linspace(-42, 38, 64)).astype(np.float32).reshape(64, 1)
    out = np.empty(codes.shape, np.uint16)
    dequantise_into(codes, scales, 1, 256, out)
    wide = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scales)
    expected = wide.to(torch.bfloat16)
    found = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))


def test_config_index_and_side_files_are_those_of_a_bf16_model(tmp_path):
    """PAINS D7, E4: quantization_config goes, also a nested one; format, total_size and side files are right."""
    source = deepseek(tmp_path / "fp8")
    edit_config(source, text_config={"quantization_config": {"quant_method": "fp8"}, "dtype": "float8"})
    (source / "code").mkdir()
    (source / "code" / "modeling.py").write_text("pass")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    result = cast(source, tmp_path / "bf16")
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in json.dumps(config)
    assert (config["torch_dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in load(tmp_path / "bf16").values())
    assert {h.metadata["format"] for h in read_checkpoint(tmp_path / "bf16").headers.values()} == {"pt"}
    assert result.side_files == ("tokenizer.json", "code/modeling.py")
    assert result.left_files == ("pytorch_model.bin",)
    assert (tmp_path / "bf16" / "code" / "modeling.py").read_text() == "pass"


def test_scales_in_another_shard_are_read_from_there(tmp_path):
    """PAINS E1."""
    source = deepseek(tmp_path / "fp8")
    moved = {}

    def take(tensors):
        moved.update({name: tensors.pop(name) for name in list(tensors) if name.endswith(SCALE)})

    edit_shard(source, FIRST, take, index=False)
    edit_shard(source, SECOND, lambda tensors: tensors.update(moved))
    assert moved
    cast(source, tmp_path / "bf16")
    assert_cast(source, tmp_path / "bf16")


def test_dropping_mtp_leaves_it_out_of_shards_index_and_config(tmp_path):
    source = deepseek(tmp_path / "fp8")
    result = cast(source, tmp_path / "bf16", mtp="drop")
    assert_cast(source, tmp_path / "bf16", left_out=".layers.3.")
    assert not [name for name in read_weight_map(tmp_path / "bf16") if ".layers.3." in name]
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert all(".layers.3." in name for name in result.dropped)
    assert verify(tmp_path / "bf16").findings == []


def test_stale_keys_of_the_index_are_dropped_and_reported(tmp_path):
    """PAINS D1: rotary_emb.inv_freq listed, held by no shard."""
    source = deepseek(tmp_path / "fp8")
    stale = "model.layers.1.self_attn.rotary_emb.inv_freq"
    list_also(source, stale)
    result = cast(source, tmp_path / "bf16")
    assert "held by no shard" in result.dropped[stale]
    assert stale not in read_weight_map(tmp_path / "bf16")


def test_a_missing_mtp_shard_is_an_error_unless_mtp_is_dropped(tmp_path):
    source = deepseek(tmp_path / "fp8")
    edit_all(source, lambda tensors: [tensors.pop(n) for n in list(tensors) if ".layers.3." in n])
    lost = "model-00004-of-000004.safetensors"
    list_also(source, "model.layers.3.enorm.weight", lost)
    with pytest.raises(Fault, match="--mtp drop"):
        cast(source, tmp_path / "bf16")
    assert not (tmp_path / "bf16").exists()
    cast(source, tmp_path / "bf16", mtp="drop")
    assert verify(tmp_path / "bf16").findings == []


@pytest.mark.parametrize(("kind", "damage"), [(k, ways[0]) for k, ways in SEEDED_FP8.items()], ids=list(SEEDED_FP8))
def test_a_wrong_scale_or_dtype_is_refused_before_the_first_byte(tmp_path, kind, damage):
    """PAINS E2, E5, E6: DeepSeek's own script warns and writes FP8 into the BF16 checkpoint."""
    source = deepseek(tmp_path / "fp8")
    damage(source)
    with pytest.raises(Fault):
        cast(source, tmp_path / "bf16")
    assert not (tmp_path / "bf16").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_a_scale_that_is_no_positive_number_is_refused(tmp_path, value):
    source = deepseek(tmp_path / "fp8")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    edit_shard(source, FIRST, put(name, "F32", np.full((2, 2), value, "<f4")))
    with pytest.raises(Fault, match=r"up_proj.*scale of block \[0, 0\]"):
        cast(source, tmp_path / "bf16")
    assert not (tmp_path / "bf16" / "config.json").exists()


def test_a_lost_tensor_is_refused(tmp_path):
    """PAINS E9: the output's keys are the input's without the scales, or the cast fails."""
    source = deepseek(tmp_path / "fp8")
    list_also(source, "model.layers.0.mlp.extra.weight")
    with pytest.raises(Fault, match=r"lost.*mlp\.extra"):
        cast(source, tmp_path / "bf16")


def test_a_checkpoint_that_would_not_verify_is_refused(tmp_path):
    source = deepseek(tmp_path / "fp8")
    edit_all(source, rename_where("experts.0.gate_proj", "experts.zero.gate_proj"))
    with pytest.raises(Fault, match="nothing was written"):
        cast(source, tmp_path / "bf16")


def test_a_bf16_source_is_copied_bit_for_bit_and_cleaned(tmp_path):
    """Moonlight is BF16 already, and its index lists inv_freq."""
    source = deepseek(tmp_path / "source", fp8=False)
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_shard(source, FIRST, put(inv_freq, "F32", np.ones(8, "<f4")))
    cast(source, tmp_path / "target", mtp="drop")
    after, before = load(tmp_path / "target"), load(source)
    assert before.keys() - after.keys() == {inv_freq} | {n for n in before if ".layers.3." in n}
    assert all(bits(after[name]) == bits(before[name]) for name in after)


def test_shards_that_only_held_dropped_tensors_vanish_and_the_rest_is_numbered_again(tmp_path):
    source = deepseek(tmp_path / "fp8", shards=8)
    cast(source, tmp_path / "bf16", mtp="drop")
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) < 8
    assert verify(tmp_path / "bf16").findings == []


@pytest.mark.parametrize("place", ["source", "inside", "foreign"])
def test_a_target_that_is_not_ours_is_refused(tmp_path, place):
    source = deepseek(tmp_path / "fp8")
    targets = {"source": source, "inside": source / "bf16", "foreign": tmp_path / "foreign"}
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    before = tree_bytes(tmp_path)
    with pytest.raises(UsageFault):
        cast(source, targets[place])
    assert tree_bytes(tmp_path) == before


def test_a_full_disk_is_noticed_before_the_first_byte(tmp_path, monkeypatch):
    source = deepseek(tmp_path / "fp8")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(Fault, match="are needed and"):
        cast(source, tmp_path / "bf16")
    assert list((tmp_path / "bf16").glob("*.safetensors")) == []


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
    context.set_forkserver_preload(["ckpt_tools.cast", "warm_kernels", "torch"])
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


def test_an_index_that_lists_the_wrong_file_is_believed_where_the_shards_are(tmp_path):
    source = deepseek(tmp_path / "fp8")
    write_index(source, read_weight_map(source) | {"lm_head.weight": SECOND}, 0)
    cast(source, tmp_path / "bf16")
    assert_cast(source, tmp_path / "bf16")
