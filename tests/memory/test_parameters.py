"""Parameter counts: published totals, and every name and shape of the real library's models."""

import math

import pytest

from atlasrl.errors import Fault, UsageFault
from atlasrl.memory import architecture, parameters, shapes

TOTALS = {
    "DeepSeek-V3": 671_026_419_200,
    "Moonlight-16B-A3B": 15_960_110_208,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
}


@pytest.mark.parametrize(("name", "total"), TOTALS.items())
def test_published_totals(name, total):
    a = shapes.find(name)
    assert parameters.total(a) == total
    assert sum(weight.size for _, weight in a.tensors()) == total, "tensor by tensor"


def test_deepseek_published_parts():
    a = shapes.find("DeepSeek-V3")
    bias = 58 * 256  # left out of the published active counts
    assert parameters.routed(a) == 653_908_770_816
    assert parameters.active(a) - bias == 37_552_282_624
    assert parameters.active(a, with_embedding=False) - bias == 36_625_603_584
    assert parameters.draft_module(a) == 11_610_068_224
    assert parameters.draft_module(a, with_copies=True) == 13_463_426_304
    assert parameters.total(a) + parameters.draft_module(a, with_copies=True) == 684_489_845_504


def test_moonlight_published_parts():
    a = shapes.find("Moonlight-16B-A3B")
    assert parameters.active(a) == 2_914_776_192
    assert parameters.total(a) + 27 * 64 == 15_960_111_936, "the checkpoint also stores 27 rotary inv_freq of 64"


@pytest.mark.parametrize("name", TOTALS)
def test_shares_add_up_to_the_model(name):
    """What the ranks of one replica hold together is the model, plus what is replicated on purpose."""
    a = shapes.find(name)
    tensor = 2
    p = parameters.Placement(tensor, 4 if a.experts else 1)
    for dense in {a.is_dense(i) for i in range(a.layers)}:
        whole, part = parameters.layer(a, dense, parameters.WHOLE), parameters.layer(a, dense, p)
        replicated = sum(w.size * w.copies for w in a.layer_weights(dense) if w.split == "replicated")
        assert part.dense * tensor - replicated == whole.dense
        assert part.expert * p.expert == whole.expert


def meta_model(config: dict):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(config)
    kind = config.pop("model_type")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))


REDUCED = {
    "DeepSeek-V3": {"num_hidden_layers": 4, "n_routed_experts": 16, "first_k_dense_replace": 2},
    "Moonlight-16B-A3B": {"num_hidden_layers": 3, "n_routed_experts": 8},
    "Qwen3-30B-A3B": {"num_hidden_layers": 6, "num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [5]},
    "Qwen3-235B-A22B": {"num_hidden_layers": 2, "num_experts": 8},
    "Qwen2.5-0.5B": {"num_hidden_layers": 2},
    "Qwen2.5-7B": {"num_hidden_layers": 2},
}


def assert_same_tensors(config: dict):
    real = meta_model(config)
    expected = {name: tuple(tensor.shape) for name, tensor in real.named_parameters()}
    expected |= {name: tuple(tensor.shape) for name, tensor in real.named_buffers() if "correction_bias" in name}
    a = architecture.from_config(config)
    ours = {name: weight.shape for name, weight in a.tensors()}
    assert ours == expected
    trained = sum(p.numel() for p in real.parameters())
    assert sum(w.size for _, w in a.tensors() if w.trained) == trained
    assert parameters.total(a) == sum(math.prod(shape) for shape in expected.values())


@pytest.mark.verl
@pytest.mark.parametrize("name", REDUCED)
def test_every_tensor_of_a_reduced_model_is_that_of_transformers(name):
    assert_same_tensors({**shapes.CONFIGS[name], **REDUCED[name]})


@pytest.mark.verl
def test_every_tensor_of_qwen3_dense_and_of_biased_attention_is_that_of_transformers():
    dense = {
        **{k: v for k, v in shapes.CONFIGS["Qwen2.5-1.5B"].items() if k != "model_type"},
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": 96,
    }
    assert_same_tensors(dense)
    assert_same_tensors({**dense, "attention_bias": True})
    assert_same_tensors({**shapes.CONFIGS["DeepSeek-V3"], **REDUCED["DeepSeek-V3"], "attention_bias": True})


@pytest.mark.verl
@pytest.mark.parametrize("name", [name for name in TOTALS if name.startswith("Qwen2.5")])
def test_every_tensor_of_a_full_dense_model_is_that_of_transformers(name):
    assert_same_tensors(shapes.CONFIGS[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in TOTALS if not name.startswith("Qwen2.5")])
def test_every_tensor_of_a_full_mixture_is_that_of_transformers(name):
    """Tens of thousands of expert modules: up to some minutes each."""
    assert_same_tensors(shapes.CONFIGS[name])


def test_foreign_families_are_refused_by_name():
    with pytest.raises(UsageFault, match="gpt_oss"):
        architecture.from_config({"model_type": "gpt_oss"})


@pytest.mark.parametrize("missing", ["hidden_size", "kv_lora_rank", "n_shared_experts"])
def test_a_missing_key_is_named_unless_it_has_a_meaning(missing):
    config = {key: value for key, value in shapes.CONFIGS["DeepSeek-V3"].items() if key != missing}
    if missing == "n_shared_experts":
        assert architecture.from_config(config).experts.shared_width == 0
    else:
        with pytest.raises(Fault, match=missing):
            architecture.from_config(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "big"),
        ("hidden_size", 0),
        ("vocab_size", -5),
        ("num_hidden_layers", 2.5),
        ("n_routed_experts", "all"),
        ("kv_lora_rank", None),
        ("num_attention_heads", True),
    ],
)
def test_a_size_that_is_none_is_one_line(key, value):
    with pytest.raises(Fault) as fault:
        architecture.from_config({**shapes.CONFIGS["DeepSeek-V3"], key: value}, "here/config.json")
    assert str(fault.value).startswith("here/config.json: ")


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_a_damaged_config_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Fault, match=r"config\.json"):
        architecture.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("DeepSeek-V3-Base", True),
        ("DeepSeek-R1-BF16", True),
        ("Qwen2.5-7B-Instruct", True),
        ("Qwen9", False),
        ("", False),
    ],
)
def test_models_are_known_by_folder_name(name, known):
    assert (shapes.find(name) is not None) is known
