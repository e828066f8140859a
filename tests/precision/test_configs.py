"""Configurations are read and never run, normalised, and their differences stand in the order that counts."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlasrl import recipe as recipes
from atlasrl.errors import UsageFault
from atlasrl.precision import configs, effective, normal, shell
from atlasrl.precision.effective import Effective

SCRIPT = r"""
#!/usr/bin/env bash
set -xeuo pipefail   # don't stop at an apostrophe
max_prompt_length=$((1024 * 2))
max_response_length=$(( max_prompt_length * 4 ))
name='single $HOME'
RAY_DATA_HOME=${RAY_DATA_HOME:-"/data/with space"}
TEST_FILE="['${RAY_DATA_HOME}/a.parquet']"
export HCCL_BUFFSIZE=300 VLLM_USE_V1=1
offload=True
ROLLOUT=(
    actor_rollout_ref.rollout.n=16   # answers
    actor_rollout_ref.rollout.temperature="${TEMPERATURE:-1.0}"
)
HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo --config-path=config \
    --config-name='ppo_megatron_trainer.yaml' \
    data.train_files="${RAY_DATA_HOME}/dapo.parquet" \
    data.val_files="$TEST_FILE" \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=$max_response_length \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) / 3)) \
    "${ROLLOUT[@]}" \
    trainer.experiment_name="$name" \
    +actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True \
    trainer.logger=['console'] actor_rollout_ref.actor.megatron.param_offload=${offload}
"""


def test_a_script_is_read_as_bash_would_run_it(tmp_path):
    stub = tmp_path / "python3"
    stub.write_text(
        '#!/bin/sh\nprintf "%s\\0" "$@" >"$ARGUMENTS"\nprintf "%s" "$HCCL_BUFFSIZE$HYDRA_FULL_ERROR" >"$SEEN"\n'
    )
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ARGUMENTS": str(tmp_path / "a"), "SEEN": str(tmp_path / "s")}
    subprocess.run([shutil.which("bash"), "-c", SCRIPT], env=environment, check=True, stderr=subprocess.DEVNULL)
    passed = (tmp_path / "a").read_text().split("\0")
    wanted = dict(each.lstrip("+").split("=", 1) for each in passed if "=" in each and not each.startswith("--"))
    read = shell.parse(SCRIPT)
    assert read.overrides == wanted
    assert read.environment["HCCL_BUFFSIZE"] + read.environment["HYDRA_FULL_ERROR"] == (tmp_path / "s").read_text()
    assert read.config_name == "ppo_megatron_trainer"


def test_nothing_of_a_script_is_executed(tmp_path):
    mark = tmp_path / "mark"
    script = tmp_path / "evil.sh"
    script.write_text(
        f"touch {mark}\nx=$(touch {mark})\ny=`touch {mark}`\nz=$((__import__('os').system('touch {mark}')))\n"
        f'python -m verl.trainer.main_ppo a.b=$x a.c=$z a.d="$(touch {mark})" a.e=$((9**9**9))\n'
    )
    launch = shell.read(script)
    assert not mark.exists()
    assert launch.overrides["a.b"] == f"$(touch {mark})"
    assert any("known only when the script runs" in note for note in launch.notes)


@pytest.mark.parametrize("text", ["python -m verl.trainer.main_ppo 'a.b=1", "x=${y", "x=$((1", "echo `date"])
def test_a_script_that_never_closes_something_is_refused_in_one_line(tmp_path, text):
    script = tmp_path / "s.sh"
    script.write_text(text)
    with pytest.raises(UsageFault, match=r"^[^\n]*no shell script[^\n]*$"):
        shell.read(script)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(ValueError):
        shell.parse(text)


def run_of(folder, *changes, environment=None):
    """A run directory with the plan of the tiny recipe."""
    from dataclasses import asdict

    from atlasrl.rundir import RunDir
    from atlasrl.trainer.overrides import verl_overrides

    run = RunDir(folder)
    run.path.mkdir()
    recipe = recipes.load("tiny", list(changes))
    overrides = verl_overrides(recipe, nodes=1, devices_per_node=1, model="m", train="t", val=None, run=run)
    plan = {
        "recipe": recipe.model_dump(mode="json"),
        "overrides": [asdict(override) for override in overrides],
        "environment": environment or {"OMP_NUM_THREADS": "1"},
    }
    run.plan.write_text(json.dumps(plan))
    return effective.load(str(folder))


def levels(left, right):
    return {each.key: each.effect.level for each in configs.differences(left, right)}


def test_two_runs_of_one_recipe_differ_in_nothing_that_counts(tmp_path):
    found = levels(run_of(tmp_path / "a"), run_of(tmp_path / "b", "seed=2"))
    assert set(found.values()) <= {"rounding", "none"} and found["data.seed"] == "rounding"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("optimizer.learning_rate=1e-4", "actor_rollout_ref.actor.optim.lr"),
        ("dapo.clip_high=0.2", "actor_rollout_ref.actor.clip_ratio_high"),
        ("dapo.dynamic_sampling=false", "algorithm.filter_groups.enable"),
        ("data.shuffle=false", "data.shuffle"),
        ("rollout.temperature=0.7", "actor_rollout_ref.rollout.temperature"),
        ("dapo.overlong.penalty=0.1", "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor"),
        ("rollout.samples=4", "actor_rollout_ref.rollout.n"),
    ],
)
def test_what_changes_the_objective_is_named_first(tmp_path, change, key):
    left, right = run_of(tmp_path / "a"), run_of(tmp_path / "b", change, "checkpoint.save_every=5", "seed=9")
    found = configs.differences(left, right)
    assert key in {each.key for each in found if each.effect.level == "strong"}
    assert found[0].effect.level == "strong"
    assert [configs.LEVELS.index(each.effect.level) for each in found] == sorted(
        configs.LEVELS.index(each.effect.level) for each in found
    )


def test_a_gpu_team_says_the_same_in_other_words(tmp_path):
    ours = run_of(tmp_path / "run")
    words = {
        "actor_rollout_ref.actor.optim.lr": "0.00020",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.0",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "-1",
        "actor_rollout_ref.rollout.top_k": "0",
        "actor_rollout_ref.actor.fsdp_config.dtype": "torch.float32",
        "actor_rollout_ref.rollout.temperature": "1",
    }
    lines = [f"{key}={override}" for key, override in words.items()]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    said = {override["key"].lstrip("+") for override in plan["overrides"]}
    from atlasrl.trainer.override import Override

    lines += [
        f"'{Override(o['key'], o['value'], '')}'".replace("='", "=").replace("''", "'")
        if isinstance(o["value"], str)
        else f'"{Override(o["key"], o["value"], "")}"'
        for o in plan["overrides"]
        if o["key"].lstrip("+") not in words
    ]
    script = tmp_path / "gpu.sh"
    script.write_text("python -m recipe.dapo.main_dapo \\\n  " + " \\\n  ".join(lines) + " \\\n  " + " ".join(
        ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc",
         "algorithm.filter_groups.max_num_gen_batches=20", "data.gen_batch_size=32"]))  # fmt: skip
    theirs = effective.load(str(script))
    assert said <= theirs.given | {"actor_rollout_ref.actor.optim.lr_warmup_steps"}
    assert {k: v for k, v in levels(ours, theirs).items() if v in configs.TELLING} == {}


def test_the_same_file_at_another_place_is_no_difference_and_another_file_at_the_same_place_is_one():
    def side(path, digest):
        settings = {"custom_reward_function.path": path, "trainer.nnodes": 1}
        return Effective("x", settings, files={"reward": digest}, given=set(settings))

    assert levels(side("/a/reward.py", "1"), side("/b/rule.py", "1")) == {}
    assert levels(side("/a/reward.py", "1"), side("/a/reward.py", "2")) == {"files.reward": "strong"}


def test_what_nobody_reads_is_no_difference():
    quiet = {"actor_rollout_ref.actor.use_kl_loss": False, "actor_rollout_ref.actor.kl_loss_coef": 0.001}
    loud = quiet | {"actor_rollout_ref.actor.use_kl_loss": True}
    change = {"actor_rollout_ref.actor.kl_loss_coef": 0.1}
    sides = [Effective("x", settings, given=set(settings)) for settings in (quiet, quiet | change, loud, loud | change)]
    assert levels(sides[0], sides[1]) == {}
    assert levels(sides[2], sides[3]) == {"actor_rollout_ref.actor.kl_loss_coef": "strong"}


def test_a_version_counts_only_where_both_are_known():
    old, new = Effective("a", {}, versions={"verl": "0.7.0"}), Effective("b", {}, versions={"verl": "0.7.1"})
    assert levels(old, new) == {"version.verl": "some"}
    assert levels(old, Effective("c", {})) == {}


def test_every_effect_has_a_reason_and_a_known_level():
    for entry in configs.rules()["effects"]:
        assert entry["level"] in configs.LEVELS and len(entry["reason"]) > 10 and entry["source"], entry


@given(
    st.sampled_from(["True", "true", 1, "1", "1.0", 1.0, "1e0", None, "null", "", [], ["a"], "bf16", "torch.bfloat16"])
)
def test_a_plain_value_is_a_fixed_point(raw):
    assert normal.value(normal.value(raw)) == normal.value(raw)


def test_the_record_of_a_run_holds_no_secret(tmp_path, monkeypatch):
    from atlasrl.rundir import RunDir

    monkeypatch.setenv("HF_HUB_TOKEN", "s3cret")
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    attempt = RunDir(tmp_path).attempt(1)
    attempt.path.mkdir(parents=True)
    effective.record(attempt, {"trainer": {"nnodes": 1}}, {"dapo": {"dynamic_sampling": True}})
    text = effective.path(attempt).read_text()
    assert "s3cret" not in text and json.loads(text)["environment"]["HCCL_BUFFSIZE"] == "200"


def test_the_command_exits_1_on_a_telling_difference(tmp_path):
    from click.testing import CliRunner

    from atlasrl.cli.probe import main

    run_of(tmp_path / "a")
    run_of(tmp_path / "b", "dapo.clip_high=0.2")
    done = CliRunner().invoke(main, ["configs", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 1 and "clip_ratio_high: 0.28 | 0.2" in done.output
    assert CliRunner().invoke(main, ["configs", str(tmp_path / "a"), str(tmp_path / "a")]).exit_code == 0
