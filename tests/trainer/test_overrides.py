"""What a recipe becomes in verl: every key exists in the real verl, composes, and becomes the dataclass it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atlasrl.errors import Fault, UsageFault
from atlasrl.recipe import RECIPES, load, parse
from atlasrl.rundir import RunDir
from atlasrl.trainer.override import Override
from atlasrl.trainer.overrides import verl_overrides

PYLIB = Path(__file__).parents[2] / "pylib"
BASE = {
    "model": {"path": "/m"},
    "data": {"train": "/t"},
    "dapo": {"train_batch_size": 8, "mini_batch_size": 8, "micro_batch_size": 2},
    "rollout": {"samples": 8},
}
CPU = {**BASE, "device": "cpu", "backend": "fsdp2", "rollout": {"engine": "cpu", "samples": 8}}
CASES = {
    "cpu-fsdp2": CPU,
    "npu-fsdp2": {
        **BASE,
        "backend": "fsdp2",
        "dapo": {**BASE["dapo"], "overlong": None, "tokens_per_device": 10240},
    },
    "npu-megatron": {
        **BASE,
        "backend": "megatron",
        "parallel": {
            "tensor": 2,
            "pipeline": 2,
            "expert": 2,
            "first_stage_layers": 3,
            "last_stage_layers": 2,
            "recompute": "full",
            "offload": True,
        },
        "rollout": {"samples": 8, "tensor": 2, "expert": 4},
    },
    "cpu-megatron": {**CPU, "backend": "megatron"},
    "cuda-fsdp2": {**BASE, "device": "cuda", "backend": "fsdp2"},
}


def overrides(tree, nodes=1, devices=8, run="/runs/r", val=None, **changes):
    recipe = parse({**tree, **changes}, "test")
    return verl_overrides(
        recipe, nodes=nodes, devices_per_node=devices, model="/m", train="/t.parquet", val=val, run=RunDir(run)
    )


def values(tree, **options):
    return {o.key.lstrip("+"): o.value for o in overrides(tree, **options)}


def test_planning_imports_no_verl_and_no_torch():
    code = "import sys, atlasrl.trainer.overrides; print([m for m in ('verl', 'torch', 'ray') if m in sys.modules])"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(PYLIB)})
    assert asked.stdout.strip() == "[]", asked.stderr


def test_what_the_recipe_says_under_verl_comes_last_and_wins():
    made = overrides(CPU, verl={"trainer.logger": ["console"], "++new.key": 1})
    assert [(o.key, o.value) for o in made[-2:]] == [("trainer.logger", ["console"]), ("++new.key", 1)]


@pytest.mark.parametrize("case", CASES)
def test_every_setting_has_a_reason_and_is_set_once(case):
    made = overrides(CASES[case])
    assert all(o.reason for o in made)
    keys = [o.key.lstrip("+") for o in made]
    assert len(keys) == len(set(keys))


def test_validation_needs_data_and_an_interval():
    assert values(CPU, validate_every=5)["trainer.test_freq"] == -1
    asked = values(CPU, validate_every=5, val="/v.parquet")
    assert (asked["trainer.test_freq"], asked["trainer.val_before_train"]) == (5, True)


@pytest.mark.parametrize(
    ("dapo", "devices", "says"),
    [
        ({"train_batch_size": 8, "mini_batch_size": 3}, 1, "not a multiple of dapo.mini_batch_size 3"),
        ({"train_batch_size": 8, "mini_batch_size": 8, "micro_batch_size": 5}, 2, "can be 1, 2, 4, 8, 16, 32"),
        ({"train_batch_size": 1, "mini_batch_size": 1}, 16, "a multiple of 16"),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_sizes_that_do(dapo, devices, says):
    with pytest.raises(UsageFault, match=says):
        overrides(CPU, devices=devices, dapo={"micro_batch_size": 1, **dapo})


def test_packing_needs_room_for_one_answer_and_replaces_the_row_count():
    packed = {**BASE["dapo"], "micro_batch_size": 5, "tokens_per_device": 10240}
    made = values(CPU, dapo=packed)
    assert made["actor_rollout_ref.actor.use_dynamic_bsz"] is True
    assert made["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == 10240
    with pytest.raises(UsageFault, match=r"10239 is less than one answer: .* = 10240"):
        values(CPU, dapo={**packed, "tokens_per_device": 10239})


def test_a_setting_that_the_backend_lacks_is_refused():
    with pytest.raises(UsageFault, match="selective is Megatron's"):
        overrides(CPU, parallel={"recompute": "selective"})


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_of_ours_can_be_planned(name):
    recipe = load(name)
    made = verl_overrides(
        recipe,
        nodes=recipe.nodes,
        devices_per_node=recipe.devices_per_node,
        model="/m",
        train="/t",
        val="/v",
        run=RunDir("/runs/r"),
    )
    assert made


# -- against the real verl and hydra ----------------------------------------------------------------


@pytest.fixture(scope="module")
def compose():
    pytest.importorskip("verl")
    from atlasrl.trainer.setup import compose

    def composed(tree, resume_from=None, **options):
        recipe = parse({**tree, **options.pop("changes", {})}, "test")
        settings = [{"key": o.key, "value": o.value, "reason": o.reason} for o in overrides(tree, **options)]
        return compose({"overrides": settings}, recipe, resume_from)

    return composed


TEXTS = [
    "/a b/c",
    "it's",
    "back\\slash",
    "tail\\",
    "quo'te\\",
    "a\\b'c\\\\'",
    "a,b=[c]{d}:e",
    "$HOME",
    "µ",
    "'",
    "\\'",
    "",
    "null",
]
VALUES = [None, True, -1, 1e-6, 0.28, [1, "a b"], {"k": "v w", "n": None}]


@pytest.mark.verl
def test_any_text_and_value_survives_hydra_and_a_resume_names_its_checkpoint(compose):
    """One composition for all: each takes about a second."""
    from omegaconf import OmegaConf

    verl = {f"++new.t{i}": text for i, text in enumerate(TEXTS)} | {f"++new.v{i}": v for i, v in enumerate(VALUES)}
    config = compose(CPU, resume_from="/r/global_step_5", val="/v.parquet", verl=verl, run="/runs/it's a run")
    new = OmegaConf.to_container(config.new)
    assert [new[f"t{i}"] for i in range(len(TEXTS))] == TEXTS
    assert [new[f"v{i}"] for i in range(len(VALUES))] == VALUES
    assert config.trainer.default_local_dir == "/runs/it's a run/checkpoints"
    assert (config.trainer.resume_mode, config.trainer.resume_from_path) == ("resume_path", "/r/global_step_5")
    assert config.trainer.val_before_train is False, "an earlier attempt has validated that step"


@pytest.mark.verl
@pytest.mark.parametrize("case", CASES)
def test_every_key_exists_in_verl_and_becomes_its_dataclass(compose, case):
    """A key without ++ that verl does not know fails in hydra; a key the dataclass does not know fails here."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.workers.config import HFModelConfig  # noqa: F401

    config = compose(CASES[case], val="/v.parquet")
    OmegaConf.resolve(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert type(actor).__name__ == ("McoreActorConfig" if "megatron" in case else "FSDPActorConfig")
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert actor.use_kl_loss is False
    assert rollout.n == 8
    validate_config(config, use_reference_policy=False, use_critic=False)


@pytest.mark.verl
def test_a_key_that_verl_does_not_know_is_one_line(compose):
    with pytest.raises(Fault, match=r"trainer\.loger.*a new key needs \+\+") as told:
        compose(CPU, verl={"trainer.loger": ["console"]})
    assert "\n" not in str(told.value)


@given(text=st.text(alphabet="a\\'\"$,=[]{}: ", max_size=8))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_back_by_hydra_s_own_parser(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assume("${" not in text)  # an interpolation is meant as one
    value = OverridesParser.create().parse_override(str(Override("k", text, "r"))).value()
    assert getattr(value, "text", value) == text


def test_an_override_prints_as_hydra_reads_it():
    assert str(Override("a.b", [1, "x"], "r")) == "a.b=[1,'x']"


# -- switches of the NPU's rollout engine ----------------------------------------------------------


def engine_of(*changes: str) -> dict:
    from atlasrl import recipe as recipes

    loaded = recipes.load("deepseek-v3-671b-dapo", list(changes))
    made = verl_overrides(
        loaded, nodes=32, devices_per_node=8, model="/m", train="/t", val=None, run=RunDir(Path("/r"))
    )
    return {override.key.lstrip("+").rpartition("vllm.additional_config.")[2]: override.value for override in made}


def test_a_graph_of_torchair_comes_with_its_scheduler_and_fresh_weights():
    graph = engine_of("rollout.graph=torchair")
    wanted = ("torchair_graph_config.enabled", "ascend_scheduler_config.enabled", "refresh")
    assert all(graph[name] is True for name in wanted)
    assert graph["actor_rollout_ref.rollout.enforce_eager"] is False
    plain = engine_of("rollout.graph=none")
    assert plain["actor_rollout_ref.rollout.enforce_eager"] is True
    assert not plain.keys() & set(wanted)


def test_chunked_prefill_of_latent_attention_is_a_switch_of_the_npu_s_engine():
    assert engine_of("rollout.chunked_prefill=true")["chunked_prefill_for_mla"] is True
    assert "chunked_prefill_for_mla" not in engine_of("rollout.chunked_prefill=false")
    assert "chunked_prefill_for_mla" not in engine_of("rollout.chunked_prefill=true", "device=cuda")


def test_an_npu_run_asks_for_its_attention_kernel_and_for_one_clock():
    flash = "actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn"
    npu, cuda = engine_of(), engine_of("device=cuda")
    assert npu[flash] is True and npu["actor_rollout_ref.nccl_timeout"] == 7200
    assert flash not in cuda and "actor_rollout_ref.nccl_timeout" not in cuda
    assert engine_of(f"verl.++{flash}=false")[flash] is False, "what the recipe says last wins"
