"""`ckpt cast`: bit-identical to the reference formula; what cannot be cast is refused before a byte is written."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from defects import (
    FIRST,
    SECOND,
    SEEDED_FP8,
    edit_all,
    edit_config,
    edit_shard,
    list_also,
    put,
    rename_where,
    set_metadata,
)
from safetensors.torch import load_file
from tiny_checkpoints import (
    QUANTISED,
    deepseek,
    random_codes,
    read_weight_map,
    tree_bytes,
    write_checkpoint,
    write_index,
)

from ckpt_tools import proof
from ckpt_tools.cast import cast, claim_target, describe
from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.diff import diff
from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.formats import dequantise, round_to_bfloat16
from ckpt_tools.kernels import dequantise_into
from ckpt_tools.plan import plan_cast
from ckpt_tools.proof import spot_check
from ckpt_tools.shard import cast_shard
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
    """Also reports E5 and E7: rows that are no multiple of 128, and the F32 router bias stays F32."""
    source = deepseek(tmp_path / "fp8")
    result = cast(source, tmp_path / "bf16")
    assert_cast(source, tmp_path / "bf16")
    kinds = {t.dtype for n, t in load(tmp_path / "bf16").items() if n.endswith("correction_bias")}
    assert kinds == {torch.float32}
    assert any(t.shape[0] % 128 for t in read_checkpoint(source).tensors().values() if t.dtype == "F8_E4M3")
    assert result.checked == len(load(tmp_path / "bf16"))
    assert verify(tmp_path / "bf16").findings == []


@pytest.mark.parametrize("way", ["compiled loop", "look-up"])
def test_all_256_codes_and_scales_of_every_size_are_cast_as_torch_does(way):
    """The loop that casts and the look-up that proves the cast share no arithmetic; torch is the judge of both."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(64, 0)
    scales = (10.0 ** np.linspace(-42, 38, 64)).astype(np.float32).reshape(64, 1)
    if way == "look-up":
        out = dequantise(codes, scales, (1, 256))
    else:
        out = np.empty(codes.shape, np.uint16)
        dequantise_into(codes, 0, scales, 1, 256, out)
    wide = torch.from_numpy(codes).view(torch.float8_e4m3fn).float() * torch.from_numpy(scales)
    expected = wide.to(torch.bfloat16)
    found = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))


def test_rounding_to_bf16_is_torchs_for_ties_subnormals_and_overflow():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits = np.concatenate([bits, bits & 0xFFFF8000, bits & 0x807FFFFF, bits | 0x7F7F0000])
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(round_to_bfloat16(values), expected)


def test_config_index_and_side_files_are_those_of_a_bf16_model(tmp_path):
    """Reports D6, D7, E4: quantization_config goes, also a nested one; format, totals and side files are right."""
    source = deepseek(tmp_path / "fp8")
    edit_config(source, text_config={"quantization_config": {"quant_method": "fp8"}, "dtype": "float8"})
    set_metadata(source, {"total_size": 1, "total_parameters": 333_000})
    (source / "code").mkdir()
    (source / "code" / "modeling.py").write_text("pass")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    result = cast(source, tmp_path / "bf16")
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert "quantization_config" not in json.dumps(config)
    assert (config["torch_dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())
    weights = load(tmp_path / "bf16").values()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights)
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in weights)
    assert {h.metadata["format"] for h in read_checkpoint(tmp_path / "bf16").headers.values()} == {"pt"}
    assert result.side_files == ("tokenizer.json", "code/modeling.py")
    assert result.left_files == ("pytorch_model.bin",)
    assert (tmp_path / "bf16" / "code" / "modeling.py").read_text() == "pass"


def test_scales_in_another_shard_are_read_from_there(tmp_path):
    """Report E1: DeepSeek's script failed when weight and scale lie in different shards."""
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
    """Report D1: rotary_emb.inv_freq listed, held by no shard."""
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
    """Reports E2, E5, E6: DeepSeek's own script warns and writes FP8 into the BF16 checkpoint."""
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
    """Report E9: the output's keys are the input's without the scales, or the cast fails."""
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


def test_an_index_that_lists_the_wrong_file_is_believed_where_the_shards_are(tmp_path):
    source = deepseek(tmp_path / "fp8")
    write_index(source, read_weight_map(source) | {"lm_head.weight": SECOND}, 0)
    cast(source, tmp_path / "bf16")
    assert_cast(source, tmp_path / "bf16")


def test_a_block_is_what_the_config_says_not_rows_by_scales(tmp_path):
    """Report E6: 1000 rows and 8 scales are blocks of 128; taken as blocks of 125, 84 rows get a wrong scale."""
    generator = np.random.default_rng(0)
    scales = 2.0 ** np.arange(8, dtype="<f4").reshape(8, 1)
    tensors = {"w": ("F8_E4M3", random_codes(generator, (1000, 96))), "w_scale_inv": ("F32", scales)}
    source = write_checkpoint(tmp_path / "fp8", [tensors], {"quantization_config": QUANTISED})
    cast(source, tmp_path / "bf16")
    assert_cast(source, tmp_path / "bf16")


def test_a_large_tensor_is_cast_in_pieces_of_any_width(tmp_path):
    generator = np.random.default_rng(0)
    tensors = {}
    for columns in (1001, 300_001):
        scales = generator.uniform(1e-4, 1e-2, (-(-700_000 // columns // 128), -(-columns // 128))).astype("<f4")
        codes = random_codes(generator, (700_000 // columns, columns))
        tensors |= {f"w{columns}": ("F8_E4M3", codes), f"w{columns}_scale_inv": ("F32", scales)}
    source = write_checkpoint(tmp_path / "fp8", [tensors], {"quantization_config": QUANTISED})
    cast(source, tmp_path / "bf16")
    assert_cast(source, tmp_path / "bf16")
    assert diff(source, tmp_path / "bf16").changed == []


def test_only_fp8_changes_every_other_dtype_stays_bit_for_bit(tmp_path):
    """Report E11: a family with F32 and integer parameters loses them to "everything to bf16"."""
    generator = np.random.default_rng(0)
    others = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2"}
    tensors = {d: (d, np.frombuffer(generator.bytes(24 * 8), kind)[:24].reshape(4, 6)) for d, kind in others.items()}
    tensors |= {"BOOL": ("BOOL", np.ones((3, 1), "u1")), "scalar": ("F32", np.float32(0.1).reshape(()))}
    tensors |= {"w": ("F8_E4M3", random_codes(generator, (4, 6))), "w_scale_inv": ("F32", np.full((1, 1), 3, "<f4"))}
    source = write_checkpoint(tmp_path / "fp8", [tensors], {"quantization_config": QUANTISED})
    cast(source, tmp_path / "bf16")
    assert_cast(source, tmp_path / "bf16")


def test_memory_does_not_grow_with_the_shard(tmp_path):
    """Report E3: "how much memory?" A few pieces."""
    codes, scales = np.ones((8192, 4096), np.uint8), np.ones((64, 32), "<f4")
    tensors = {"w": ("F8_E4M3", codes), "w_scale_inv": ("F32", scales)}
    source = write_checkpoint(tmp_path / "fp8", [tensors], {"quantization_config": QUANTISED})
    plan = plan_cast(read_checkpoint(source), tmp_path / "bf16")
    claim_target(plan)
    tracemalloc.start()
    try:
        cast_shard(plan.jobs[0])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < plan.size / 32


@pytest.mark.parametrize("whole", [proof.WHOLE_BYTES, 0], ids=["all of it", "a sample"])
def test_the_proof_notices_a_wrong_tensor(tmp_path, monkeypatch, whole):
    """Report E10: recompute a part by another path before anyone wonders about gibberish."""
    monkeypatch.setattr(proof, "WHOLE_BYTES", whole)
    source = deepseek(tmp_path / "fp8")
    plan = plan_cast(read_checkpoint(source), tmp_path / "bf16")
    cast(source, tmp_path / "bf16")
    assert spot_check(plan) == (len(load(tmp_path / "bf16")) if whole else proof.SAMPLE_TENSORS)
    for job in plan.jobs:
        path = tmp_path / "bf16" / job.file
        data = bytearray(path.read_bytes())
        data[len(job.header) :: 2] = bytes(byte ^ 1 for byte in data[len(job.header) :: 2])  # the last bit of each BF16
        path.write_bytes(data)
    with pytest.raises(Fault, match="not what the reference formula gives"):
        spot_check(plan)


def test_a_tokenizer_that_is_not_the_sources_is_named(tmp_path):
    """Report E10: gibberish after the cast came from the tokenizer of another version."""
    source, target = deepseek(tmp_path / "fp8"), tmp_path / "bf16"
    assert cast(source, target).foreign_files == ()
    (target / "tokenizer.json").write_text('{"version": "V2"}')
    result = cast(source, target)
    assert result.already
    assert result.foreign_files == ("tokenizer.json",)
    assert "tokenizer.json" in "".join(describe(result))
    assert (target / "tokenizer.json").read_text() == '{"version": "V2"}', "perhaps an edit on purpose"
