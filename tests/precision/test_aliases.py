"""Derived tensors: found without being told, and only the stale ones alarm."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from atlasrl.precision.aliases import (  # noqa: E402
    Derivation,
    Place,
    derivations,
    derived_tensors,
    locate,
    stale,
)

pytestmark = pytest.mark.verl

HEADS, NOPE, VALUE, LATENT = 2, 8, 12, 16


class Impl:
    """A plain helper object that owns derived tensors, as vLLM's attention backends do."""

    def derive(self, weight, contiguous: bool):
        """vllm-ascend 0.10, attention/mla_v1.py process_weights_after_loading: weight [N * (P + V), L]."""
        folded = weight.T.view(LATENT, HEADS, NOPE + VALUE)
        key, value = folded.split([NOPE, VALUE], dim=-1)
        self.W_UV, self.W_UK_T = value.transpose(0, 1), key.permute(1, 2, 0)
        if contiguous:
            self.W_UV, self.W_UK_T = self.W_UV.contiguous(), self.W_UK_T.contiguous()


class Attention(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.q_proj = torch.nn.Linear(32, HEADS * NOPE, bias=False, dtype=dtype)
        self.kv_b_proj = torch.nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False, dtype=dtype)
        self.register_buffer("cos", torch.arange(64).float().cos().to(dtype), persistent=False)
        self.impl = Impl()


class Decoder(torch.nn.Module):
    def __init__(self, dtype=torch.float32, contiguous=False, layers=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(Attention(dtype) for _ in range(layers))
        self.contiguous = contiguous
        self.after_loading()

    def after_loading(self):
        for layer in self.layers:
            layer.impl.derive(layer.kv_b_proj.weight.detach(), self.contiguous)


@pytest.fixture
def mindspeed_view(monkeypatch):
    """MindSpeed core_r0.12.1, megatron_basic/requirements_basic.py: `view` makes its argument contiguous first."""
    original = torch.Tensor.view
    monkeypatch.setattr(torch.Tensor, "view", lambda tensor, *shape: original(tensor.contiguous(), *shape))


def update(module):
    """A weight sync: every parameter is written in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))


def names(found):
    return {(d.name, d.source) for d in found}


OF_MLA = {
    (f"layers.{layer}.impl.{name}", f"layers.{layer}.kv_b_proj.weight")
    for layer in range(2)
    for name in ("W_UV", "W_UK_T")
}


def test_views_are_named_and_stay_fresh():
    module = Decoder()
    links = derivations(module)
    assert names(links) == OF_MLA and all(d.shares for d in links)
    update(module)
    assert stale(module, links) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contiguous_copies_are_traced_to_their_source_and_found_stale(dtype):
    module = Decoder(dtype, contiguous=True)
    links = derivations(module)
    assert names(links) == OF_MLA and not any(d.shares for d in links)
    update(module)
    assert names(stale(module, links)) == OF_MLA


def test_a_patched_view_makes_copies_that_are_found_stale(mindspeed_view):
    module = Decoder()
    links = derivations(module)
    assert names(links) == OF_MLA and not any(d.shares for d in links)
    update(module)
    assert names(stale(module, links)) == OF_MLA


def test_copies_that_are_made_anew_after_the_update_do_not_alarm(mindspeed_view):
    module = Decoder(contiguous=True)
    links = derivations(module)
    update(module)
    module.after_loading()
    assert stale(module, links) == []
    module.layers[1].impl.W_UV = None  # released until the next wake-up
    assert stale(module, links) == []


def test_one_stale_layer_is_told_from_its_neighbour():
    module = Decoder(contiguous=True)
    links = derivations(module)
    update(module)
    module.layers[0].impl.derive(module.layers[0].kv_b_proj.weight.detach(), contiguous=True)
    assert {d.name for d in stale(module, links)} == {"layers.1.impl.W_UV", "layers.1.impl.W_UK_T"}


def test_a_view_that_lost_its_source_is_stale():
    """The update replaced the parameter instead of writing into it."""
    module = Decoder()
    links = derivations(module)
    module.layers[0].kv_b_proj.weight = torch.nn.Parameter(torch.randn(HEADS * (NOPE + VALUE), LATENT))
    assert {d.name for d in stale(module, links)} == {"layers.0.impl.W_UV", "layers.0.impl.W_UK_T"}


def test_a_fused_projection_names_the_part_that_is_stale():
    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(16, rows, bias=False) for rows in (32, 8, 8))
            self.fuse()

        def fuse(self):
            self.qkv = torch.cat([self.q.weight, self.k.weight, self.v.weight]).detach()

    module = Fused()
    links = derivations(module)
    assert names(links) == {("qkv", "q.weight"), ("qkv", "k.weight"), ("qkv", "v.weight")}
    with torch.no_grad():
        module.k.weight.mul_(2)
    assert names(stale(module, links)) == {("qkv", "k.weight")}
    module.fuse()
    assert stale(module, links) == []


def small_deepseek_v3():
    from trainer_assets import untrained_model

    return untrained_model(experts=4)


def small_qwen3_moe():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            tie_word_embeddings=True,
        )
    )


@pytest.mark.parametrize("build", [small_deepseek_v3, small_qwen3_moe])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_false_alarm_on_models_without_derived_weights(build, dtype):
    model = build().to(dtype).eval()
    tokens = torch.arange(1, 9)[None]
    assert any("inv_freq" in name for name in derived_tensors(model))
    for _ in range(3):
        model(input_ids=tokens)
        links = derivations(model)
        update(model)
        model(input_ids=tokens)
        assert stale(model, links) == []


def test_a_stale_copy_planted_into_such_a_model_is_the_only_alarm():
    model = small_deepseek_v3()
    attention = model.model.layers[1].self_attn
    attention.W_UV = attention.kv_b_proj.weight.detach()[8:16].T.contiguous()
    links = derivations(model)
    update(model)
    found = stale(model, links)
    assert [str(d) for d in found] == [
        "model.layers.1.self_attn.W_UV is a copy from model.layers.1.self_attn.kv_b_proj.weight"
    ]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_chain_of_views_is_located(data):
    """Views, permutations and slices of a random tensor, copied: found, and at the place where they were taken."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    source = torch.randn(24, 30, generator=generator).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    view = source.view(*data.draw(st.sampled_from([(24, 30), (4, 6, 30), (24, 5, 6), (4, 6, 3, 10), (720,)])))
    view = view.permute(*data.draw(st.permutations(range(view.dim()))))
    for dim in range(view.dim()):
        start = data.draw(st.integers(0, view.shape[dim] // 3))
        view = view.narrow(dim, start, view.shape[dim] - start)
    place = locate(view.contiguous(), source)
    assert place is not None
    assert torch.equal(source.flatten().as_strided(view.shape, place.strides, place.offset), view)
    if source.dtype == torch.float32:
        assert place == Place(view.storage_offset(), view.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_its_own_is_located_nowhere(dtype):
    source, other = torch.randn(64, 64).to(dtype), torch.randn(8, 8).to(dtype)
    assert locate(other, source) is None
    almost = source[8:16, 8:16].clone()
    almost[3, 3] += 1
    assert locate(almost, source) is None


def test_constants_have_no_source():
    class Norms(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(64)
            self.ones, self.nan = torch.ones(64), torch.full((64,), float("nan"))

    assert derivations(Norms()) == []


def test_the_finding_reads_as_a_sentence():
    assert str(Derivation("a.W_UV", "a.kv", shares=True)) == "a.W_UV shares the storage of a.kv"
