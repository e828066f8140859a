"""`ckpt diff`: shows every difference and nothing else; knows FP8, tied heads and other spellings of experts."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from defects import FIRST, edit_all, edit_config, edit_shard, put, remove_where, rename_where
from tiny_checkpoints import deepseek, write_checkpoint

from ckpt_tools.cast import cast
from ckpt_tools.diff import Difference, diff, digest_lines
from ckpt_tools.errors import Fault

NORM = "model.norm.weight"


def nothing_but(result: Difference, *fields: str) -> None:
    """No kind of difference other than those named."""
    for name in {"only_first", "only_second", "shapes", "dtypes", "changed"} - set(fields):
        assert not getattr(result, name), name


@pytest.fixture
def pair(tmp_path) -> tuple[Path, Path]:
    return deepseek(tmp_path / "a", fp8=False), deepseek(tmp_path / "b", fp8=False, shards=5)


def test_the_same_weights_in_other_shards_are_equal(pair):
    result = diff(*pair)
    nothing_but(result)
    assert (result.exit_code(), result.equal) == (0, 99)


def test_a_changed_value_is_measured(pair):
    file = next(p.name for p in pair[1].glob("*.safetensors") if NORM.encode() in p.read_bytes()[:20000])
    values = np.zeros(192, "<f4")
    edit_norm(pair[0], FIRST, np.full(192, 2.0, "<f4"))
    edit_norm(pair[1], file, np.where(np.arange(192) == 7, 3.0, 2.0).astype("<f4") + values)
    result = diff(*pair)
    nothing_but(result, "changed")
    (change,) = result.changed
    assert (change.name, change.largest, change.differing, change.elements) == (NORM, 1.0, 1, 192)
    assert change.mean == pytest.approx(1 / (2 * 192))
    assert change.checksums[0] != change.checksums[1]
    assert result.exit_code() == 1
    assert result.exit_code(tolerance=0.01) == 0


def edit_norm(folder: Path, file: str, values: np.ndarray) -> None:
    def edit(tensors):
        assert NORM in tensors
        tensors[NORM] = ("BF16", (values.view(np.uint32) >> 16).astype("<u2"))

    edit_shard(folder, file, edit)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_against_a_number_is_an_infinite_change_and_passes_no_tolerance(pair, value):
    edit_norm(pair[0], FIRST, np.full(192, value, "<f4"))
    (change,) = diff(*pair).changed
    assert math.isinf(change.mean)
    assert diff(*pair).exit_code(tolerance=1e9) == 1


def test_nan_in_the_same_places_is_equal(pair):
    for folder in pair:
        file = next(p.name for p in folder.glob("*.safetensors") if f'"{NORM}"'.encode() in p.read_bytes()[:30000])
        edit_norm(folder, file, np.full(192, np.nan, "<f4"))
    nothing_but(diff(*pair))


def test_missing_keys_and_shapes_are_reported(pair):
    """Report C16: a merged model that is smaller than the original, with no error."""
    edit_shard(pair[0], FIRST, remove_where("layers.0.self_attn.o_proj"))
    edit_shard(pair[0], FIRST, put(NORM, "BF16", np.zeros(8, "<u2")))
    result = diff(*pair)
    nothing_but(result, "only_second", "shapes")
    assert result.only_second == ["model.layers.0.self_attn.o_proj.weight"]
    assert result.shapes == {NORM: ((8,), (192,))}


def test_an_fp8_checkpoint_equals_its_cast(tmp_path):
    source = deepseek(tmp_path / "fp8")
    cast(source, tmp_path / "bf16")
    result = diff(source, tmp_path / "bf16")
    nothing_but(result, "dtypes")
    assert set(result.dtypes.values()) == {("F8_E4M3", "BF16")}
    assert result.exit_code() == 0


def test_experts_numbered_last_are_recognised(pair):
    """Report C16, verl#4338: experts.gate_proj.weight0 is experts.0.gate_proj.weight."""
    edit_all(pair[0], rename_where("experts.0.gate_proj.weight", "experts.gate_proj.weight0"))
    result = diff(*pair)
    nothing_but(result)
    assert "spelled otherwise" in result.notes[0]


def test_fused_experts_are_compared_one_by_one(tmp_path):
    generator = np.random.default_rng(0)
    gate, up = (generator.integers(0, 999, (4, 6, 8)).astype("<u2") for _ in range(2))
    down = generator.integers(0, 999, (4, 8, 6)).astype("<u2")
    stem = "model.layers.0.mlp.experts"
    fused = {
        f"{stem}.gate_up_proj": ("BF16", np.concatenate([gate, up], axis=1)),
        f"{stem}.down_proj": ("BF16", down),
    }
    single = {}
    for expert in range(4):
        for part, array in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            single[f"{stem}.{expert}.{part}.weight"] = ("BF16", array[expert].copy())
    write_checkpoint(tmp_path / "fused", [fused], {})
    write_checkpoint(tmp_path / "single", [single], {})
    result = diff(tmp_path / "fused", tmp_path / "single")
    nothing_but(result)
    assert result.equal == 12
    single[f"{stem}.2.up_proj.weight"][1][3, 3] ^= 1
    write_checkpoint(tmp_path / "single", [single], {})
    (change,) = diff(tmp_path / "fused", tmp_path / "single").changed
    assert change.name == f"{stem}.2.up_proj.weight"


def test_a_tied_head_is_compared_with_the_others_lm_head(pair):
    """Report D12: lm_head in one file set, not in the other."""
    edit_all(pair[0], remove_where("lm_head"))
    edit_config(pair[0], tie_word_embeddings=True)
    (change,) = diff(*pair).changed
    assert change.name == "lm_head.weight"


def test_headers_only_reads_no_data(pair):
    edit_norm(pair[0], FIRST, np.zeros(192, "<f4"))
    result = diff(*pair, values=False)
    nothing_but(result)
    assert result.read_bytes == 0


def test_a_broken_shard_is_an_error_not_a_difference(pair):
    (pair[0] / FIRST).write_bytes(b"")
    with pytest.raises(Fault, match="0 bytes found"):
        diff(*pair)


def test_the_digest_depends_on_the_weights_only(pair):
    here, there = (list(digest_lines(folder)) for folder in pair)
    assert here == there
    edit_norm(pair[0], FIRST, np.zeros(192, "<f4"))
    changed = list(digest_lines(pair[0]))
    assert [n for n, (a, b) in enumerate(zip(changed, here, strict=True)) if a != b] == [
        next(n for n, line in enumerate(here) if line.endswith(NORM)),
        len(here) - 1,
    ]


def test_the_checksum_sees_swapped_words_and_single_bits():
    from ckpt_tools.checksum import Checksum

    def digest(data: np.ndarray, *cuts: int) -> str:
        checksum = Checksum()
        for piece in np.split(data, cuts):
            checksum.update(piece)
        return checksum.hexdigest()

    data = np.random.default_rng(0).integers(0, 256, 8003, dtype=np.uint8)
    whole = digest(data)
    assert digest(data, 800, 4000) == whole
    swapped = data.copy()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    one_bit = data.copy()
    one_bit[-1] ^= 128
    longer = np.append(data, np.uint8(0))
    assert len({whole, digest(swapped), digest(one_bit), digest(longer), digest(data[:-3])}) == 5


def test_json_output_is_json_even_with_infinite_changes(pair):
    from click.testing import CliRunner

    from ckpt_tools.cli import main

    edit_norm(pair[0], FIRST, np.full(192, np.nan, "<f4"))
    run = CliRunner().invoke(main, ["diff", *map(str, pair), "--json"])
    assert run.exit_code == 1
    (change,) = json.loads(run.stdout, parse_constant=pytest.fail)["changed"]
    assert (change["name"], change["mean"]) == (NORM, "inf")
