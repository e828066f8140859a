"""Bisection names the module that was broken, in few comparisons, from dumps that stay small."""

from __future__ import annotations

import copy
import math
import shutil
import sys

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_aliases import small_deepseek_v3, small_qwen3_moe
from torch import nn
from trainer_assets import make_assets, recipe_tree, write_plan

from atlasrl.cli import probe
from atlasrl.errors import Fault, UsageFault
from atlasrl.precision import bisect, dumps, rollouts, stack

pytestmark = pytest.mark.verl
WIDTH = 16


class Attention(nn.Module):
    """Two branches that meet in the arithmetic of the module itself, as in latent attention."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = 4 * WIDTH**-0.5  # sharp enough that the scale matters

    def forward(self, hidden):
        query, key = self.q(hidden), self.kv(hidden)
        weights = (query @ key.transpose(-1, -2) * self.scale).softmax(-1)
        return self.o(weights @ key)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        hidden = self.norm(hidden)
        hidden = hidden + self.attention(hidden)
        return hidden + self.mlp(hidden).relu()


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, hidden):
        tokens = hidden  # given to each layer anew: averaging alone makes all tokens equal, then no scale matters
        for layer in self.layers:
            hidden = layer(hidden + tokens)
        return self.head(hidden)


def model(layers=8):
    torch.manual_seed(0)
    return Model(layers)


def dump(folder, network, dtype=torch.float32, **bounds):
    recorder = stack.Recorder(folder, inputs="same", **bounds)
    network = network.to(dtype)
    recorder.weights(network)
    hidden = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    with recorder.watch(network):
        out = network(hidden)
    network.zero_grad()
    out.float().pow(2).mean().backward()
    recorder.gradients(network)
    return dumps.read(recorder.close())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return dump(tmp_path_factory.mktemp("whole") / "dump", model())


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return dump(tmp_path_factory.mktemp("deep") / "dump", model(16))


def scale(layer, network):
    network.layers[layer].attention.scale *= 1.5


def weight(layer, network, part="mlp"):
    with torch.no_grad():
        network.layers[layer].get_submodule(part).weight.neg_()


@pytest.mark.parametrize("layer", [8, 14])
def test_a_wrong_scale_is_found_in_log2_of_the_layers(tmp_path, deep, layer):
    broken = model(16)
    scale(layer, broken)
    finding = bisect.compare(deep, dump(tmp_path / "d", broken))
    assert finding.culprit == f"layers.{layer}.attention" and "arithmetic of Attention itself" in finding.why
    assert finding.comparisons <= math.log2(16) + 13  # the layers, and what is inside one


@pytest.mark.parametrize("part", ["norm", "mlp", "attention.q", "attention.kv", "attention.o"])
def test_a_wrong_weight_is_told_from_wrong_arithmetic(tmp_path, whole, part):
    broken = model()
    weight(4, broken, part)
    finding = bisect.compare(whole, dump(tmp_path / "d", broken))
    assert finding.culprit == f"layers.4.{part}" and f"weights differ: layers.4.{part}.weight" in finding.why


def test_a_module_that_computes_wrongly_is_named(tmp_path, whole):
    broken = model()
    broken.layers[7].mlp.register_forward_hook(lambda module, args, out: out * 1.01)
    finding = bisect.compare(whole, dump(tmp_path / "d", broken))
    assert finding.culprit == "layers.7.mlp" and "arithmetic of Linear itself" in finding.why


def test_a_fault_that_the_layers_after_it_shrink_below_the_tolerance_is_found(tmp_path):
    """Layers that normalise and are given the tokens anew forget: the logits of both sides agree."""
    broken = model(32)
    scale(0, broken)
    sides = dump(tmp_path / "a", model(32)), dump(tmp_path / "b", broken)
    outputs = [side.roots[0].outputs for side in sides]
    assert bisect.Comparison(*sides).excess(*outputs) < 1, "the fault is to be invisible at the end"
    finding = bisect.compare(*sides)
    assert finding.culprit == "layers.0.attention" and "arithmetic of Attention itself" in finding.why


def around(centre, factor):
    """A hook that brings what a layer gives out `factor` times as near to (or as far from) `centre`."""
    return lambda module, args, out: centre + factor * (out - centre)


def test_a_difference_that_shrinks_and_grows_again_is_followed_to_its_source(tmp_path):
    """Bisection meets layers in the middle that look right, and ends behind them."""
    sides, centres = [model(16), model(16)], []
    for layer in sides[0].layers:
        layer.register_forward_hook(lambda module, args, out: centres.append(out.detach()))
    dump(tmp_path / "once", sides[0])
    scale(2, sides[1])
    for side in sides:
        for layer, factor in {3: 1e-4, 10: 3.5, 11: 3.5, 12: 3.5, 13: 3.5}.items():
            side.layers[layer].register_forward_hook(around(centres[layer], factor))
    finding = bisect.compare(dump(tmp_path / "a", sides[0]), dump(tmp_path / "b", sides[1]))
    assert finding.culprit == "layers.2.attention", finding


def test_differences_that_only_grow_are_no_module_s_fault(tmp_path, deep):
    """Other kernels everywhere: each module is right within rounding, all together are not."""
    other, ripple = model(16), 1 + 0.6e-4 * torch.tensor([1.0, -1.0])
    for module in other.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, args, out: out * ripple.repeat(out.shape[-1] // 2))
    finding = bisect.compare(deep, dump(tmp_path / "d", other))
    assert finding.culprit == "(model)" and "no module makes a right input wrong" in finding.why


def dump_real(folder, network, dtype=torch.float32):
    tokens = torch.randint(3, 16, (4, 24), generator=torch.Generator().manual_seed(2))
    answer = torch.ones_like(tokens)
    answer[:, :8] = 0
    recorder = stack.Recorder(folder)
    stack.record_step(network.to(dtype), stack.Rows(tokens, torch.ones_like(tokens), answer), recorder)
    return dumps.read(recorder.close())


@pytest.mark.parametrize("build", [small_deepseek_v3, small_qwen3_moe])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_of_real_models_are_found_and_rounding_is_none(tmp_path, build, dtype):
    """Embeddings without a floating input, latent attention, routers that choose other experts near a tie."""
    network = build()
    right = dump_real(tmp_path / "right", copy.deepcopy(network), dtype)
    exact = dump_real(tmp_path / "exact", copy.deepcopy(network))
    finding = bisect.compare(right, exact)
    assert finding.culprit is None, finding

    scaled = copy.deepcopy(network)
    scaled.model.layers[0].self_attn.scaling *= 3
    finding = bisect.compare(dump_real(tmp_path / "scaled", scaled, dtype), right)
    assert finding.culprit == "model.layers.0.self_attn" and "itself (in attention: scores" in finding.why, finding

    embedded = copy.deepcopy(network)
    with torch.no_grad():
        embedded.model.embed_tokens.weight[::2] *= 1.5
    finding = bisect.compare(dump_real(tmp_path / "embedded", embedded, dtype), right)
    assert finding.culprit == "model.embed_tokens" and "weights differ: model.embed_tokens.weight" in finding.why


def test_recorded_answers_are_dumped_and_bisected_on_the_command_line(tmp_path):
    from safetensors.torch import load_file, save_file

    assets = make_assets(tmp_path / "assets")
    run = write_plan(tmp_path / "run", recipe_tree(assets), assets)
    ids = torch.randint(3, 16, (8, 14), generator=torch.Generator().manual_seed(3))
    recorded = {"prompts": ids[:, :8], "responses": ids[:, 8:], "attention_mask": torch.ones_like(ids)}
    generation = rollouts.Generation(["0:a", "1:b"], ["a", "b"], recorded)
    rollouts.write(run.rollouts, rollouts.Recording(1, [generation]))
    tensors = load_file(assets["model"] / "model.safetensors")
    tensors["model.layers.0.self_attn.kv_b_proj.weight"].neg_()
    other = shutil.copytree(assets["model"], tmp_path / "model")
    save_file(tensors, other / "model.safetensors", {"format": "pt"})

    def bin_probe(*words):
        done = CliRunner().invoke(probe.main, [str(word) for word in words])
        return done.exit_code, done.output

    for folder, options in (("right", ()), ("again", ()), ("wrong", ("--model", other))):
        code, output = bin_probe("dump", run.path, tmp_path / folder, "--limit", 1, *options)
        assert code == 0, output
        assert sum(file.stat().st_size for file in (tmp_path / folder).iterdir()) <= 1 << 20
    assert bin_probe("stack", tmp_path / "again", tmp_path / "right")[0] == 0
    code, output = bin_probe("stack", tmp_path / "wrong", tmp_path / "right")
    assert code == 1 and "first difference: model.layers.0.self_attn.kv_b_proj\n" in output
    assert "its weights differ: model.layers.0.self_attn.kv_b_proj.weight" in output


def test_equal_models_agree_and_rounding_is_no_difference(tmp_path, whole):
    assert bisect.compare(whole, dump(tmp_path / "a", model())).culprit is None
    small = model(8)
    half = dump(tmp_path / "b", copy.deepcopy(small), torch.bfloat16)
    assert bisect.compare(dump(tmp_path / "c", small), half).culprit is None


def test_a_wrong_backward_with_right_outputs_shows_in_the_gradients(tmp_path):
    broken = model(4)
    broken.layers[1].mlp.weight.register_hook(lambda gradient: gradient * 2)
    finding = bisect.compare(dump(tmp_path / "a", model(4)), dump(tmp_path / "b", broken))
    assert finding.culprit == "layers.1.mlp.weight" and "gradient" in finding.why


@pytest.mark.parametrize("limit", [10_000, 60_000, 500_000])
def test_a_dump_never_exceeds_its_bound_and_says_what_it_lacks(tmp_path, limit):
    folder = tmp_path / "d"
    found = dump(folder, model(16), limit=limit, sample=64)
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size <= limit
    assert found.facts["complete"] is (found.facts["left_out"] == 0) is (limit == 500_000)
    if not found.facts["complete"]:
        with pytest.raises(Fault, match=r"left out \d+ tensors beyond its bound"):
            bisect.compare(found, found)


def test_dumps_of_other_inputs_are_refused(tmp_path, whole):
    other = dump(tmp_path / "d", model())
    other.facts["inputs"] = "other"
    with pytest.raises(Fault, match="saw other inputs"):
        bisect.compare(whole, other)


def test_nan_on_one_side_is_a_difference_and_on_both_sides_is_none(tmp_path):
    broken = model(4)
    with torch.no_grad():
        broken.layers[2].mlp.bias[0] = math.nan
    left, right = dump(tmp_path / "a", model(4)), dump(tmp_path / "b", broken)
    assert bisect.compare(left, right).culprit == "layers.2.mlp"
    assert bisect.compare(right, right).culprit is None


@settings(deadline=None)
@given(st.integers(1, 3000), st.data())
def test_bisection_asks_at_most_log2_questions_and_one(count, data):
    answer = data.draw(st.integers(0, count - 1))
    asked = []

    def is_bad(index):
        asked.append(index)
        return index >= answer

    assert bisect.first(count, is_bad) == answer
    assert len(asked) <= math.ceil(math.log2(count)) + 1


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 300))
def test_a_slice_lies_inside_and_has_no_place_twice(elements, sample):
    places = stack.places(elements, sample).tolist()
    assert len(set(places)) == min(elements, sample) and min(places) >= 0 and max(places) < elements


@pytest.mark.parametrize("content", ["", "{", "[]", '{"data": 3}', '{"kind": "atlasrl.stack"}'])
def test_what_is_no_dump_is_told_in_one_line(tmp_path, content):
    (tmp_path / "dump.json").write_text(content)
    (tmp_path / "index.jsonl").write_text('{"kind": "in"}\n')
    with pytest.raises((Fault, UsageFault), match=r"^[^\n]+$"):
        dumps.read(tmp_path)


MSPROBE = """
import sys, torch
sys.path.insert(0, {here!r})
from pathlib import Path
from test_stack import model, scale
from atlasrl.precision import msprobe
network = model(4)
if {broken}: scale(2, network)
with msprobe.watch(network, Path({folder!r})):
    network(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))).sum().backward()
print(msprobe.result(Path({folder!r})))
"""


def test_dumps_of_msprobe_are_bisected_too(tmp_path):
    """msprobe patches torch for good, so it runs in processes of its own."""
    import os
    import subprocess
    from pathlib import Path

    from atlasrl.precision import msprobe

    if not msprobe.is_installed():
        pytest.skip("msprobe is not installed")
    found = []
    for broken in (False, True):
        code = MSPROBE.format(here=str(Path(__file__).parent), broken=broken, folder=str(tmp_path / str(broken)))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(dumps.read(Path(done.stdout.splitlines()[-1])))
    finding = bisect.compare(*found)
    assert finding.culprit == "layers.2.attention" and "arithmetic of Attention itself" in finding.why
