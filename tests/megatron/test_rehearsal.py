"""A 671B-shaped recipe, shrunk, through the real trainer; and the rule by which it is shrunk."""

from __future__ import annotations

import json

import pytest

from atlasrl import recipe as recipes
from atlasrl import shrink
from atlasrl.errors import UsageFault
from atlasrl.rundir import read_json_lines
from runs import Attempt, exported_weights, numbers, shrunk, start_run


@pytest.mark.training
def test_a_671b_recipe_is_rehearsed(tmp_path):
    _, whole = rehearse(tmp_path)
    assert sorted(whole.steps()) == [1, 2, 3]
    gaps = [data["training/rollout_actor_log_prob_gap"] for data in whole.steps().values()]
    assert max(gaps) < 1e-5, "the policy that answers is not the one that is trained"


@pytest.mark.training
@pytest.mark.nightly
def test_the_rehearsal_resumes_bit_equal_with_the_weights_that_were_trained(tmp_path):
    run, whole = rehearse(tmp_path)
    weights = exported_weights(run)
    again = Attempt(run, 2, resume_from=run.checkpoints / "global_step_2")
    assert again.wait() == 0, again.tail()
    assert numbers(again) == {3: numbers(whole)[3]}
    assert synced(again)[3] == synced(whole)[3], "the checkpoint holds other weights than those that were trained"
    repeated = exported_weights(run)
    assert repeated.keys() == weights.keys()
    assert all(repeated[name].equal(weights[name]) for name in weights)


def rehearse(folder):
    """The run of the recipe as it is shipped, shrunk, and its first attempt, ended."""
    recipe = shrunk(recipes.load("deepseek-v3-671b-dapo"), folder / "small")
    split = recipe.parallel
    assert (split.tensor, split.pipeline, split.expert, split.recompute) == (2, 2, 2, "full")
    assert split.first_stage_layers == 3, "the stages are no longer uneven"
    run = start_run(folder / "run", recipe)
    attempt = Attempt(run, 1)
    assert attempt.wait() == 0, attempt.tail()
    return run, attempt


def synced(attempt: Attempt) -> dict[int, str]:
    """Digest of the weights that generated each step's answers."""
    return {line["step"]: line["weights"] for line in read_json_lines(attempt.dir.samples)}


# -- the rule, without a trainer --------------------------------------------------------------------


def large(**changes):
    tree = {
        "backend": "megatron",
        "nodes": 4,
        "devices_per_node": 8,
        "model": {"path": "/models/absent"},
        "data": {"train": "/d"},
        **changes,
    }
    return recipes.parse(tree, "large")


def written(recipe, folder):
    """The small recipe, its inputs made in `folder`."""
    small = shrink.rehearse(recipe, folder)
    small.write(folder)
    return small.recipe


@pytest.mark.verl
@pytest.mark.parametrize(
    "split",
    [
        {},
        {"tensor": 8},
        {"expert": 16},
        {"pipeline": 4, "expert": 8},
        {"tensor": 8, "pipeline": 4, "expert": 16, "expert_tensor": 2},
        {"tensor": 4, "context": 2, "virtual_pipeline": 2, "pipeline": 2},
    ],
    ids=str,
)
def test_whatever_is_shrunk_can_be_planned_and_has_a_proven_layout(tmp_path, split):
    from atlasrl import plan, site
    from atlasrl.rundir import RunDir
    from atlasrl.trainer import layout

    small = written(large(parallel=split), tmp_path)
    workers = small.nodes * small.devices_per_node
    assert workers <= shrink.MOST_WORKERS
    plan.make(small, site.load("local"), RunDir(tmp_path / "run"))
    layout.require_proven(layout.of_recipe(small, workers))
    assert recipes.load(str(tmp_path / "recipe.yaml")) == small


@pytest.mark.verl
def test_what_a_cpu_cannot_honour_is_listed_with_its_reason(tmp_path):
    verl = {
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.seed": 1,
        "++actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm": True,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
    }
    recipe = large(verl=verl, parallel={"context": 2}, environment={"HCCL_BUFFSIZE": "200", "MINE": "1"})
    small = written(recipe, tmp_path)
    assert small.verl == {"actor_rollout_ref.actor.entropy_coeff": 0.01}
    assert small.environment == {"MINE": "1"}
    listed = {entry["key"]: entry["reason"] for entry in json.loads((tmp_path / shrink.SHRUNK).read_text())}
    left_out = {f"verl.{key}" for key in verl} - {"verl.actor_rollout_ref.actor.entropy_coeff"}
    assert left_out | {"environment.HCCL_BUFFSIZE", "parallel.context", "model.path"} <= listed.keys()
    assert all(listed.values())


@pytest.mark.verl
def test_the_miniature_keeps_what_is_particular_about_the_model(tmp_path):
    model = tmp_path / "moonlight"
    model.mkdir()
    config = {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 1,
        "rope_theta": 50000.0,
        "rope_scaling": None,
    }
    (model / "config.json").write_text(json.dumps(config))
    written(large(model={"path": str(model)}), tmp_path / "small")
    small = json.loads((tmp_path / "small" / "model" / "config.json").read_text())
    assert {name: small[name] for name in config} == config


def test_other_backends_and_families_are_refused(tmp_path):
    with pytest.raises(UsageFault, match="only Megatron recipes"):
        shrink.rehearse(large(backend="fsdp2"), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(UsageFault, match="'qwen3_moe' cannot be rehearsed"):
        shrink.rehearse(large(model={"path": str(tmp_path)}), tmp_path / "small")
