"""`ckpt shrink`: the small model loads in transformers and computes what the full one's first layers compute."""

import json
from pathlib import Path

import pytest
from tiny_checkpoints import deepseek, read_weight_map, tree_bytes

from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.errors import UsageFault
from ckpt_tools.shrink import choose_layers, shrink, shrunk_config
from ckpt_tools.verify import verify

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "intermediate_size": 48}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1}
GROUPS = {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "first_k_dense_replace": 1}
FAMILIES = {
    "DeepSeek-V3": ("DeepseekV3", COMMON | MOE | LATENT | GROUPS | {"q_lora_rank": 12, "num_hidden_layers": 5}),
    "Moonlight": ("DeepseekV3", COMMON | MOE | LATENT | GROUPS | {"q_lora_rank": None, "num_hidden_layers": 5}),
    "Qwen3-MoE": ("Qwen3Moe", COMMON | MOE | {"num_key_value_heads": 2, "num_experts": 8, "num_hidden_layers": 5}),
    "Qwen2.5": ("Qwen2", COMMON | {"num_key_value_heads": 2, "num_hidden_layers": 5, "intermediate_size": 48}),
}


def save_random_model(name: str, folder: Path, **changes) -> None:
    import torch
    import transformers

    prefix, config = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**config, **changes))
    model.save_pretrained(folder, max_shard_size="40KB")


def load(folder: Path):
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.verl
@pytest.mark.parametrize("name", FAMILIES)
def test_the_hidden_states_are_those_of_the_full_models_first_layers(tmp_path, name):
    import torch

    save_random_model(name, tmp_path / "full")
    moe = "dense" if name == "Qwen2.5" else "moe"
    shrink(tmp_path / "full", tmp_path / "small", **{moe: 2})
    full, small = load(tmp_path / "full"), load(tmp_path / "small")
    layers = small.config.num_hidden_layers
    assert layers < full.config.num_hidden_layers
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = full.model(tokens, output_hidden_states=True).hidden_states
        expected = full.model.norm(states[layers])
        assert torch.equal(small.model(tokens).last_hidden_state, expected)
        other = full.model.norm(states[layers - 1])
        assert not torch.allclose(other, expected), "one layer more or less would not show"


@pytest.mark.verl
@pytest.mark.parametrize("name", ["DeepSeek-V3", "Qwen3-MoE"])
def test_with_fewer_experts_the_router_is_cut_and_the_model_runs(tmp_path, name):
    import torch

    save_random_model(name, tmp_path / "full")
    shrink(tmp_path / "full", tmp_path / "small", moe=1, experts=4)
    small = load(tmp_path / "small")
    assert small.model.layers[-1].mlp.gate.weight.shape[0] == 4
    with torch.no_grad():
        assert small(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_an_fp8_model_is_shrunk_with_its_scales_and_without_mtp(tmp_path):
    source = deepseek(tmp_path / "full")
    shrink(source, tmp_path / "small", dense=1, moe=1, experts=2)
    small = read_checkpoint(tmp_path / "small")
    assert verify(tmp_path / "small").findings == []
    assert small.config["num_nextn_predict_layers"] == 0
    assert [t.shape for n, t in small.tensors().items() if n.endswith("mlp.gate.e_score_correction_bias")] == [(2,)]
    assert any(n.endswith("experts.1.up_proj.weight_scale_inv") for n in small.tensors())
    assert not any(".experts.2." in n for n in small.tensors())


def test_kept_tensors_keep_their_bytes(tmp_path):
    source = deepseek(tmp_path / "full", fp8=False)
    shrink(source, tmp_path / "small", dense=0, moe=1)

    def data(folder: Path, name: str) -> bytes:
        checkpoint = read_checkpoint(folder)
        header = checkpoint.headers[read_weight_map(folder)[name]]
        start, tensor = header.data_start, header.tensors[name]
        return header.path.read_bytes()[start + tensor.begin : start + tensor.end]

    for name in read_weight_map(tmp_path / "small"):
        assert data(tmp_path / "small", name) == data(source, name.replace("layers.0.", "layers.1."))


def test_the_config_is_edited_consistently():
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
    }
    cut = choose_layers(config, dense=2, moe=3, experts=32)
    assert cut.layers == (0, 1, 3, 4, 5)
    small, notes = shrunk_config(config, cut)
    assert small == config | {
        "num_hidden_layers": 5,
        "first_k_dense_replace": 2,
        "n_routed_experts": 32,
        "num_nextn_predict_layers": 0,
    }
    assert len(notes) == 4
    tiny, _ = shrunk_config(config, choose_layers(config, 1, 1, experts=8))
    assert (tiny["n_group"], tiny["topk_group"]) == (1, 1), "one expert per group cannot be routed"


@pytest.mark.parametrize("wish", [{"dense": 2}, {"moe": 3}, {"experts": 5}, {"experts": 1}, {"dense": 0, "moe": 0}])
def test_layers_and_experts_that_are_not_there_are_refused(tmp_path, wish):
    source = deepseek(tmp_path / "full", fp8=False)
    with pytest.raises(UsageFault):
        shrink(source, tmp_path / "small", **wish)
    assert not (tmp_path / "small").exists()


def test_a_target_with_files_is_refused(tmp_path):
    source = deepseek(tmp_path / "full", fp8=False)
    before = tree_bytes(tmp_path)
    with pytest.raises(UsageFault, match="not empty"):
        shrink(source, source)
    assert tree_bytes(tmp_path) == before


def test_per_layer_lists_of_the_config_follow_the_layers():
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "num_experts": 4,
        "mlp_only_layers": [0, 3],
        "layer_types": ["full"] * 5 + ["sliding"],
        "max_window_layers": 28,
    }
    small, _ = shrunk_config(config, choose_layers(config, dense=2, moe=2, experts=None))
    assert small["mlp_only_layers"] == [0, 3]
    assert small["layer_types"] == ["full"] * 4
    assert json.loads(json.dumps(small))["max_window_layers"] == 4
