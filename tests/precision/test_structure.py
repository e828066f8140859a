"""The attention scale: expected from config.json, found in what the running module computes, explained when wrong."""

from __future__ import annotations

import pytest

from atlasrl.errors import Fault
from atlasrl.precision import structure

YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
V3 = {
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_scaling": YARN,
}
MOONLIGHT = {**V3, "hidden_size": 2048, "num_attention_heads": 16, "rope_scaling": None}
QWEN3 = {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128}


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (V3, 0.1352337),  # DeepSeek-V3 inference/model.py with its config_671B.json
        (MOONLIGHT, 0.0721688),
        (QWEN3, 128**-0.5),
        ({"hidden_size": 576, "num_attention_heads": 9}, 64**-0.5),
        ({**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 128**-0.5),
    ],
)
def test_expected_from_config_alone(config, scale):
    assert structure.expected_scale(config).value == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "found", "cause"),
    [
        (MOONLIGHT, 128**-0.5, "1/sqrt(128)"),
        ({**V3, "head_dim": 64}, 0.125, "head_dim, which mbridge passes on as kv_channels"),
        (V3, 56**-0.5, "hidden size / heads, Megatron's default for kv_channels"),
        (V3, 192**-0.5, "without yarn's factor"),
        (V3, 192**-0.5 * 1.368888, "once instead of squared"),
        (V3, 1.0, "no scale at all"),
    ],
)
def test_a_wrong_scale_is_explained_by_the_mistake_that_gives_it(config, found, cause):
    verdict = structure.judge("layers.0", found, config, "float32")
    assert not verdict.ok and cause in verdict.cause and cause in str(verdict)


def test_the_smallest_known_error_is_told_in_half_precision_too():
    """DeepSeek-V3's remote-code config: 1/sqrt(56) is 1.2 % off."""
    assert not structure.judge("a", 56**-0.5, V3, "bfloat16").ok
    assert structure.judge("a", 0.1352337 * 1.005, V3, "bfloat16").ok


def test_a_scale_that_nobody_knows_is_wrong_without_a_story():
    verdict = structure.judge("a", 0.3, V3, "float32")
    assert not verdict.ok and verdict.cause is None


WRONG = "scale = 1.0 / math.sqrt(self.hidden_size_per_attention_head)\ntorch_npu.npu_fusion_attention(q, k, v)\n"


def test_mindspeed_sources_are_read(tmp_path):
    file = tmp_path / "mindspeed/core/transformer/dot_product_attention.py"
    file.parent.mkdir(parents=True)
    file.write_text(WRONG)
    found = structure.mindspeed_scale(MOONLIGHT, tmp_path)
    assert found.value == pytest.approx(0.0883883) and found.value / 0.0721688 == pytest.approx(1.2247, rel=1e-3)
    file.write_text("scale = self.softmax_scale\ntorch_npu.npu_fusion_attention(q, k, v)\n")
    assert structure.mindspeed_scale(MOONLIGHT, tmp_path) is None
    with pytest.raises(Fault, match="holds no mindspeed/core"):
        structure.mindspeed_scale(MOONLIGHT, tmp_path / "mindspeed")


def latent(rope=None, **changes):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 16, "q_lora_rank": 16}
    config = DeepseekV3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=2,
        rope_scaling=rope,
        **sizes,
        **changes,
    )
    return DeepseekV3ForCausalLM(config)


def grouped(**changes):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 8, "head_dim": 24, "num_experts": 2}
    config = Qwen3MoeConfig(
        vocab_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, **sizes, **changes
    )
    return Qwen3MoeForCausalLM(config)


@pytest.mark.verl
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [latent, lambda **o: latent(YARN, **o), grouped], ids=["mla", "mla-yarn", "gqa"])
def test_running_attention_of_transformers_is_measured(build, dtype, implementation):
    torch = pytest.importorskip("torch")
    model = build(attn_implementation=implementation).to(getattr(torch, dtype))
    verdicts = structure.check(model, model.config.to_dict())
    assert len(verdicts) == model.config.num_hidden_layers
    assert all(verdict.ok for verdict in verdicts), [str(v) for v in verdicts]


@pytest.mark.verl
def test_one_layer_with_the_scale_of_another_head_size_is_named():
    model = latent(YARN)
    model.model.layers[1].self_attn.scaling = 16**-0.5
    good, bad = structure.check(model, model.config.to_dict())
    assert good.ok and not bad.ok
    assert bad.module == "model.layers.1.self_attn" and "without rotary embedding" in bad.cause


@pytest.mark.verl
def test_a_kernel_that_ignores_the_scale_it_is_given_is_found(monkeypatch):
    """As MindSpeed's did: the attribute is right, the arithmetic is not."""
    import torch

    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: original(*args, **{**options, "scale": None}),
    )
    model = latent(YARN, attn_implementation="sdpa")
    assert not any(verdict.ok for verdict in structure.check(model, model.config.to_dict()))


@pytest.mark.verl
def test_a_worker_with_a_wrong_scale_does_not_start():
    from atlasrl.trainer.fsdp2_alarms import check_attention_scale

    model = latent(YARN)
    check_attention_scale(model)
    for layer in model.model.layers:
        layer.self_attn.scaling = 24**-0.5
    with pytest.raises(Fault, match=r"softmax scale of 2 attention layers is wrong.*without yarn's factor"):
        check_attention_scale(model)


@pytest.mark.verl
def test_models_with_a_rule_of_their_own_are_left_alone():
    model = grouped()
    model.model.layers[0].self_attn.scaling = 0.5
    assert len(structure.check(model, model.config.to_dict())) == 1
    assert structure.check(model, {**model.config.to_dict(), "model_type": "granite"}) == []
