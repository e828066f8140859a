"""Each fault of the Megatron stack that needs no second worker: shown on the real package, mended by ours.

The faults that need two workers are negative controls in tests/selftest; those of a resume are in test_resume.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from atlasrl.errors import Fault
from atlasrl.trainer import megatron_patches, patches

pytestmark = pytest.mark.verl
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from atlasrl.selftest import model as selftest_model

    return selftest_model.make(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def found(model):
    """What a single Megatron process with all fixes found."""
    ended = subprocess.run(
        [sys.executable, str(HERE / "one_process.py"), str(model)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_every_patch_finds_the_code_it_was_written_for(found):
    assert {name: state for name, state in found["outcomes"].items() if state == "does not apply"} == {}


def test_a_model_described_on_the_meta_device_takes_no_memory(found):
    """torch knows its factories by identity; replaced ones filled 19 GB with a model that was only to be counted."""
    assert found["device of a module made on meta"] == "meta"


def test_the_cpu_computes_the_logits_of_transformers(found):
    assert found["logits off by"] < 1e-5


def test_the_running_attention_scales_as_config_json_says(found):
    assert found["measured scale"] == pytest.approx(found["expected scale"], rel=1e-5)
    assert found["measured scale in half precision"] == pytest.approx(found["expected scale"], rel=5e-3)
    assert found["right scale"] == ""


def test_the_attention_scale_of_an_old_mindspeed_ends_the_run(found):
    assert "applies a softmax scale of 0.250000" in found["scale of MindSpeed"]


def test_ddp_and_optimizer_must_agree(found):
    assert found["flags agree"] == found["flags both plain"] == ""
    assert "the optimizer is FP32Optimizer" in found["flags differ"]


# -- faults on the unpatched packages ---------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def unpatched():
    """Another test of this process may have imported what the workers import, with all fixes."""
    patches.undo()


class Parameter(SimpleNamespace):
    requires_grad = True


def stage(*dimensions: int):
    """A pipeline stage whose parameters have these numbers of dimensions, in this order."""
    named = [(f"p{i}", Parameter(shape=(2,) * n)) for i, n in enumerate(dimensions)]
    config = SimpleNamespace(use_custom_fsdp=False)
    return SimpleNamespace(ddp_config=config, named_parameters=lambda: iter(named))


def decays(build, chunk) -> list[float]:
    return [group["wd_mult"] for group in build([chunk], None, None, 1.0, 1e-3, 0.0, None, None)]


def test_parameter_groups_of_a_later_stage_trade_their_weight_decay():
    """The first stage starts with the embedding, a later one with a norm; groups are restored by index."""
    from megatron.core.optimizer import _get_param_groups

    first, later = stage(2, 1, 2), stage(1, 2, 1)
    assert decays(_get_param_groups, first) != decays(_get_param_groups, later)
    mended = megatron_patches.same_order_on_every_stage(_get_param_groups)
    assert decays(mended, first) == decays(mended, later) == decays(_get_param_groups, first)


def deepseek(**changes):
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**{"num_nextn_predict_layers": 0, "n_group": 8, "topk_group": 4, **changes})


def test_mbridge_forgets_that_experts_are_chosen_within_groups():
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge

    class Bridge(DeepseekV3Bridge):
        def __init__(self, config):
            self.hf_config, self.extra_args = config, {}

        def _build_base_config(self, **settings):
            return {**settings, **self.extra_args}

    original = DeepseekV3Bridge._build_config
    assert original(Bridge(deepseek())).get("moe_router_num_groups") is None
    mended = megatron_patches.router_groups_of_the_checkpoint(original)
    settings = mended(Bridge(deepseek()))
    assert (settings["moe_router_num_groups"], settings["moe_router_group_topk"]) == (8, 4)
    assert "moe_router_num_groups" not in mended(Bridge(deepseek(n_group=1, topk_group=1)))


def test_a_router_that_megatron_would_read_differently_is_refused():
    mended = megatron_patches.router_groups_of_the_checkpoint(lambda self: None)
    with pytest.raises(Fault, match="num_experts_per_tok 6 is not twice topk_group 4"):
        mended(SimpleNamespace(hf_config=deepseek(num_experts_per_tok=6), extra_args={}))


def test_mbridge_from_pypi_lacks_the_arguments_that_verl_passes(monkeypatch):
    from mbridge import AutoBridge
    from mbridge.core import bridge as core

    made = []
    monkeypatch.setitem(core._MODEL_REGISTRY, "deepseek_v3", lambda config, **given: made.append(given))
    with pytest.raises(TypeError, match="dtype"):
        AutoBridge.from_config(deepseek(), dtype="float32")
    mended = megatron_patches.from_config_with_dtype(vars(AutoBridge)["from_config"])
    mended.__get__(None, AutoBridge)(deepseek(), dtype="float32")
    assert made == [{"dtype": "float32"}]

    with pytest.raises(TypeError, match="distributed_filesystem"):
        core.Bridge.save_weights(None, [], "/nonexistent", distributed_filesystem=True, memory_efficient=True)
    calls = []
    save = megatron_patches.save_weights_from_rank_0(
        lambda self, models, path, memory_efficient=False: calls.append((path, memory_efficient))
    )
    save(None, [], "/there", distributed_filesystem=True, memory_efficient=True)
    assert calls == [("/there", True)]


def test_verl_cannot_resume_without_transformer_engine(tmp_path, monkeypatch):
    from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

    original = MegatronCheckpointManager.load_checkpoint
    with pytest.raises(ModuleNotFoundError, match="transformer_engine"):
        original(None, str(tmp_path))
    mended = megatron_patches.optional_transformer_engine(original)
    with pytest.raises(AttributeError, match="generate_state_dict"):  # past the import: it wants a real manager
        mended(None, str(tmp_path))
    assert "transformer_engine" not in sys.modules
