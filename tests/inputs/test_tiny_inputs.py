"""The committed inputs of the recipe `tiny` have the shape of DeepSeek-V3 and are what the generator made."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from atlasrl import recipe

TINY = Path(__file__).resolve().parents[2] / "jobs" / "inputs" / "tiny"
MODEL = TINY / "model"
CONFIG = json.loads((MODEL / "config.json").read_text())
INDEX = json.loads((MODEL / "model.safetensors.index.json").read_text())
MTP = CONFIG["num_hidden_layers"]  # DeepSeek-V3 numbers its MTP layer after the last layer


def headers() -> dict[str, dict[str, dict]]:
    """Header entries of every tensor by shard, read without safetensors."""
    found = {}
    for shard in sorted(MODEL.glob("*.safetensors")):
        with shard.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found[shard.name] = json.loads(file.read(length))
    return found


HEADERS = headers()
TENSORS = {name: entry for header in HEADERS.values() for name, entry in header.items() if name != "__metadata__"}
STALE = {name for name in INDEX["weight_map"] if name.endswith("rotary_emb.inv_freq")}


def test_every_file_is_what_the_generator_wrote(script):
    generate = script("tiny", "generate")
    sums = generate.read_sums(TINY / "SHA256SUMS")
    assert {path: generate.sha256(TINY / path) for path in sums} == sums
    made = {str(p.relative_to(TINY)) for p in [*MODEL.iterdir(), *TINY.glob("*.parquet")]}
    assert made == set(sums)


def test_a_changed_byte_is_named(script, tmp_path):
    generate = script("tiny", "generate")
    lines = (TINY / "SHA256SUMS").read_text().splitlines()
    lines[-1] = "0" * 64 + lines[-1][64:]
    (tmp_path / "SHA256SUMS").write_text("\n".join(lines[:1] + lines[2:]) + "\n")
    differing = generate.compare(tmp_path)
    assert len(differing) == 2
    assert any("made nothing" in line for line in differing)


def test_the_folder_is_small_enough_to_commit():
    assert sum(path.stat().st_size for path in TINY.rglob("*") if "__pycache__" not in path.parts) < 2_000_000


def test_shards_and_index_agree_but_for_the_stale_rotary_keys():
    assert len(HEADERS) >= 3
    held = {name: shard for shard, header in HEADERS.items() for name in header if name != "__metadata__"}
    assert {name: shard for name, shard in INDEX["weight_map"].items() if name not in STALE} == held
    assert len(STALE) == MTP + 1
    assert not STALE & set(held)
    assert all(header["__metadata__"] == {"format": "pt"} for header in HEADERS.values())
    assert INDEX["metadata"]["total_size"] == sum(e["data_offsets"][1] - e["data_offsets"][0] for e in TENSORS.values())


def test_every_fp8_weight_has_a_scale_per_block_of_128():
    quantized = {name: entry for name, entry in TENSORS.items() if entry["dtype"] == "F8_E4M3"}
    assert CONFIG["quantization_config"]["weight_block_size"] == [128, 128]
    assert quantized.keys() == {name.removesuffix("_scale_inv") for name in TENSORS if name.endswith("_scale_inv")}
    for name, entry in quantized.items():
        scale = TENSORS[f"{name}_scale_inv"]
        assert scale["dtype"] == "F32"
        assert scale["shape"] == [-(-size // 128) for size in entry["shape"]], name


def test_a_row_count_that_128_does_not_divide_and_a_scale_in_another_shard_occur():
    rows = TENSORS["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]["shape"][0]
    assert rows > 128
    assert rows % 128
    apart = [n for n in TENSORS if n.endswith("_scale_inv") and _shard(n) != _shard(n.removesuffix("_scale_inv"))]
    assert apart, "casting must find a scale that stands in another shard than its weight"


def _shard(name: str) -> str:
    return INDEX["weight_map"][name]


def test_what_deepseek_v3_keeps_out_of_fp8_is_kept_out_here():
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        f"model.layers.{MTP}.eh_proj.weight",
    ):
        assert TENSORS[name]["dtype"] == "BF16"
    for name, entry in TENSORS.items():
        if name.endswith(("layernorm.weight", "mlp.gate.weight")):
            assert entry["dtype"] == "BF16", name
        if name.endswith("e_score_correction_bias"):
            assert entry["dtype"] == "F32", name


def test_first_layer_is_dense_then_experts_with_a_shared_one_and_an_mtp_layer():
    experts = CONFIG["n_routed_experts"]
    assert CONFIG["num_nextn_predict_layers"] == 1
    assert "model.layers.0.mlp.gate_proj.weight" in TENSORS
    for layer in range(1, MTP + 1):
        mlp = f"model.layers.{layer}.mlp"
        assert f"{mlp}.shared_experts.down_proj.weight" in TENSORS
        assert f"{mlp}.gate.e_score_correction_bias" in TENSORS
        assert [f"{mlp}.experts.{e}.up_proj.weight" in TENSORS for e in range(experts + 1)] == [True] * experts + [
            False
        ]
    own = {"embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"}
    assert {f"model.layers.{MTP}.{name}.weight" for name in own} <= TENSORS.keys()


def test_tensor_pipeline_and_expert_parallel_two_divide_the_model():
    for key in ("num_attention_heads", "n_routed_experts", "num_hidden_layers", "vocab_size", "moe_intermediate_size"):
        assert CONFIG[key] % 2 == 0, key


def test_prompts_are_in_verls_schema_and_validation_is_unseen():
    import pyarrow.parquet as pq

    splits = {split: pq.read_table(TINY / f"{split}.parquet").to_pylist() for split in ("train", "val")}
    asked = {split: {row["prompt"][0]["content"] for row in rows} for split, rows in splits.items()}
    assert not asked["train"] & asked["val"]
    for split, rows in splits.items():
        assert len(asked[split]) == len(rows)
        for row in rows:
            assert row["prompt"][0]["role"] == "user"
            assert row["reward_model"] == {"style": "rule", "ground_truth": row["prompt"][0]["content"][0]}
            assert (row["data_source"], row["extra_info"]["split"]) == ("tiny_first_digit", split)


def test_every_prompt_and_thought_fits_the_recipe(script):
    """verl leaves out longer prompts without a word, and cuts answers. One character is one token."""
    import pyarrow.parquet as pq

    data = recipe.load("tiny").data
    questions = [chat[0]["content"] for chat in pq.read_table(TINY / "train.parquet").column("prompt").to_pylist()]
    assert max(map(len, questions)) + len("=") <= data.max_prompt_tokens
    assert script("tiny", "task").LONGEST_THOUGHT + len("4") + len(["<eos>"]) <= data.max_response_tokens


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("4", 1.0),
        ("......4", 1.0),
        ("", -1.0),
        ("...", -1.0),
        ("5", -1.0),
        ("44", -1.0),
        ("4.", -1.0),
        ("4 ", -1.0),
        (" 4", -1.0),
        ("٤", -1.0),
        ("." * 10_000_000, -1.0),
        ("4\x00", -1.0),
        ("4917=4", -1.0),
        (None, -1.0),
        (4, -1.0),
    ],
)
def test_only_the_digit_after_the_thought_is_rewarded(script, answer, score):
    compute_score = script("tiny", "reward").compute_score
    assert compute_score("tiny_first_digit", answer, "4", {"index": 1}) == {"score": score, "acc": float(score > 0)}


@pytest.mark.verl
def test_quantized_blocks_come_back_within_half_a_step_of_e4m3(script):
    import torch

    weight = torch.randn(144, 200, generator=torch.Generator().manual_seed(3)) * 0.05
    weight[:128, :128] *= 1000  # a scale that is not per block would flush the other blocks
    quantized, scale = script("tiny", "fp8_checkpoint").quantize(weight)
    assert (quantized.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, (2, 2))
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:144, :200]
    error = (quantized.float() * spread - weight).abs()
    half_step = torch.maximum(weight.abs() / 16, spread * 2.0**-10)  # 3 bits of mantissa; subnormals of 2^-9
    assert (error <= half_step * 1.0001).all()


@pytest.mark.verl
def test_the_base_model_is_right_sometimes_and_knows_how_to_answer():
    """Otherwise there is nothing to sharpen, or nothing to learn."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = DeepseekV3Config(**{key: value for key, value in CONFIG.items() if key != "quantization_config"})
    model = DeepseekV3ForCausalLM(config).float().eval()
    missing = set(model.state_dict()) - set(dequantized())
    assert not missing
    model.load_state_dict({name: w for name, w in dequantized().items() if f"layers.{MTP}." not in name})
    rows = pq.read_table(TINY / "val.parquet").to_pylist()
    right, digits = [], [tokenizer.convert_tokens_to_ids(d) for d in "0123456789"]
    for row in rows:
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) + ".."
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(text)])).logits[0, -1]
        said = logits[digits].softmax(-1)
        right.append(said[int(row["reward_model"]["ground_truth"])].item())
        assert logits.argmax() in [*digits, tokenizer.convert_tokens_to_ids(".")]
    assert 0.15 < sum(right) / len(right) < 0.5


def dequantized():
    """Every weight in float32, by a rule written independently of the generator and of ckpt_tools."""
    from safetensors.torch import load_file

    stored = {name: tensor for shard in HEADERS for name, tensor in load_file(MODEL / shard).items()}
    weights = {}
    for name, tensor in stored.items():
        if f"{name}_scale_inv" in stored:
            scale = stored[f"{name}_scale_inv"]
            blocks = scale.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
            weights[name] = tensor.float() * blocks
        elif not name.endswith("_scale_inv"):
            weights[name] = tensor.float()
    return weights


@pytest.mark.nightly
def test_the_generator_makes_the_same_bytes_again(script):
    assert script("tiny", "generate").main(["--check"]) == 0
