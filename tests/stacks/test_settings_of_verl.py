"""Every emitted setting exists in the stack's verl, with the type that verl gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atlasrl import recipe, stacks
from atlasrl.lint.settings import FREE
from atlasrl.rundir import RunDir
from atlasrl.trainer.dialects import translated
from atlasrl.trainer.overrides import CONFIG_NAME, verl_overrides

HERE = Path(__file__).parent
LARGE = "deepseek-v3-671b-dapo"
CASES = {
    "671b": (LARGE, []),
    "671b-cuda": (LARGE, ["device=cuda"]),
    "moonlight": ("moonlight-16b-dapo", []),
    "qwen3": ("qwen3-30b-a3b-dapo", []),
    "npu-fsdp2": (
        "qwen3-30b-a3b-dapo",
        ["backend=fsdp2", *(f"parallel.{name}=1" for name in ("tensor", "pipeline", "expert"))],
    ),
    "virtual-selective": (
        "qwen3-30b-a3b-dapo",
        ["parallel.virtual_pipeline=2", "parallel.recompute=selective", "dapo.overlong=null"],
    ),
    "tiny": ("tiny", []),
    "tiny-megatron": ("tiny", ["backend=megatron"]),
}
FSDP2 = pytest.param("npu-fsdp2", marks=pytest.mark.nightly)
ON_NPU = [name for name in CASES if not name.startswith("tiny")]
PYTHON_TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": list, "dict": dict}


def emitted(case, stack):
    name, changes = CASES[case]
    loaded = recipe.load(name, changes)
    made = verl_overrides(
        loaded,
        nodes=loaded.nodes,
        devices_per_node=loaded.devices_per_node,
        model="/m",
        train="/t",
        val="/v",
        run=RunDir("/r"),
    )
    return loaded, translated(made, loaded, stack)


def strangers(overrides, known):
    """Settings that the list does not have, or has with another type, one line each."""
    for override in overrides:
        name = override.key.lstrip("+")
        inside = next((part for part in FREE if f".{part}." in f".{name}."), None)
        if inside:
            continue
        if name not in known:
            yield f"{name} is unknown"
        elif not fits(override.value, known[name]):
            yield f"{name} is {known[name]}, not {override.value!r}"


def fits(value, kind):
    if value is None or kind == "any":
        return True
    if isinstance(value, bool):
        return "bool" in kind.split("|")
    return isinstance(value, tuple(t for k in kind.split("|") for t in _tuple(PYTHON_TYPES[k])))


def _tuple(kind):
    return kind if isinstance(kind, tuple) else (kind,)


@pytest.mark.parametrize("case", ON_NPU)
@pytest.mark.parametrize("name", ["a2-article", "a2-0.7.0", "a2-0.7.1"])
def test_no_setting_is_unknown_to_the_stack(case, name):
    stack = stacks.load(name)
    loaded, made = emitted(case, stack)
    assert [*strangers(made, stacks.config_keys(stack, loaded.backend))] == []


@pytest.mark.parametrize("case", CASES)
def test_no_setting_is_unknown_to_the_verl_of_the_cpu(case):
    stack = stacks.load("cpu")
    loaded, made = emitted(case, stack)
    own = {"actor_rollout_ref.rollout.agent.agent_loop_manager_class": "any"}
    assert [*strangers(made, stacks.config_keys(stack, loaded.backend) | own)] == []


@pytest.mark.parametrize("name", ["a2-article", "a2-0.7.1", "cpu"])
def test_a_seeded_typo_and_a_wrong_type_are_caught(name):
    from dataclasses import replace

    stack = stacks.load(name)
    loaded, made = emitted("671b", stack)
    known = stacks.config_keys(stack, loaded.backend)
    at = next(n for n, each in enumerate(made) if each.key.endswith("actor.clip_ratio_high"))
    typo = [*made[:at], replace(made[at], key=made[at].key.replace("ratio", "raito")), *made[at + 1 :]]
    assert len([*strangers(typo, known)]) == 1
    wrong = [*made[:at], replace(made[at], value="wide"), *made[at + 1 :]]
    assert "is float, not 'wide'" in next(strangers(wrong, known))


def test_without_the_translation_the_other_versions_would_meet_unknown_keys():
    loaded, plain = emitted("671b", None)
    for name in ("a2-article", "a2-0.7.1"):
        assert [*strangers(plain, stacks.config_keys(stacks.load(name), loaded.backend))]


def test_the_sync_line_learns_of_experts_by_the_engine_and_not_by_fields():
    _, made = emitted("671b", stacks.load("a2-article"))
    said = {each.key.lstrip("+"): each.value for each in made}
    assert said["actor_rollout_ref.rollout.engine_kwargs.vllm.enable_expert_parallel"] is True
    assert "actor_rollout_ref.rollout.data_parallel_size" not in said


@pytest.mark.parametrize("name", ["a2-article", "a2-0.7.0", "a2-0.7.1"])
def test_the_engine_hears_the_longest_sequence_by_the_one_key_that_its_verl_passes_on(name):
    """0.7.0 overwrites rollout.max_model_len; SPMD passes the engine's arguments beside its own (TypeError for two)."""
    stack = stacks.load(name)
    loaded, made = emitted("671b", stack)
    rollout = "actor_rollout_ref.rollout"
    by_engine = stack.version("verl") == "0.7.0"
    wanted = f"{rollout}.engine_kwargs.vllm.max_model_len" if by_engine else f"{rollout}.max_model_len"
    longest = loaded.data.max_prompt_tokens + loaded.data.max_response_tokens
    assert [(o.key.lstrip("+"), o.value) for o in made if "max_model_len" in o.key] == [(wanted, longest)]


def test_what_the_recipe_says_under_verl_is_not_translated():
    loaded = recipe.load(LARGE, ["verl.reward_manager.name=naive"])
    made = verl_overrides(loaded, nodes=32, devices_per_node=8, model="/m", train="/t", val=None, run=RunDir("/r"))
    assert "reward_manager.name" in [each.key for each in translated(made, loaded, stacks.load("a2-0.7.1"))]


# -- against the real packages ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def verl_071(tmp_path_factory):
    """verl 0.7.1 beside the installed one; only its own files, since it runs on what is installed."""
    folder = tmp_path_factory.mktemp("verl-0.7.1")
    wheel = stacks.load("a2-0.7.1").packages["verl"].requirement("verl")
    options = ["--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check", "--target", str(folder)]
    asked = subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], capture_output=True, text=True)
    if asked.returncode:
        pytest.skip(f"no verl 0.7.1 here: {asked.stderr.strip().splitlines()[-1]}")
    return folder


def compose(loaded, overrides, path=None):
    environment = os.environ | {"PYTHONPATH": str(path or ""), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(HERE / "compose_verl.py"), CONFIG_NAME[loaded.backend]],
        input=json.dumps([str(each) for each in overrides]),
        capture_output=True,
        text=True,
        env=environment,
    )


def checked(case, stack, path=None):
    loaded, made = emitted(case, stack)
    asked = compose(loaded, made, path)
    assert asked.returncode == 0, asked.stderr[-2000:]
    out = json.loads(asked.stdout.splitlines()[-1])
    assert out["actor"] == ("McoreActorConfig" if loaded.backend == "megatron" else "FSDPActorConfig")
    assert out["clip"] == [loaded.dapo.clip_low, loaded.dapo.clip_high]
    assert (out["samples"], out["expert"]) == (loaded.rollout.samples, loaded.rollout.expert)
    return out["verl"]


@pytest.mark.verl
@pytest.mark.parametrize("case", ["671b", FSDP2])
def test_settings_compose_and_become_dataclasses_on_verl_070(case):
    assert checked(case, stacks.load("a2-0.7.0")).startswith("0.7.0")


@pytest.mark.verl
@pytest.mark.parametrize("case", ["671b", "virtual-selective", FSDP2])
def test_settings_compose_and_become_dataclasses_on_verl_071(case, verl_071):
    assert checked(case, stacks.load("a2-0.7.1"), verl_071).startswith("0.7.1")


@pytest.mark.verl
def test_settings_of_070_do_not_compose_on_071(verl_071):
    loaded, plain = emitted("671b", None)
    assert "Could not override 'reward_m" in compose(loaded, plain, verl_071).stderr


@pytest.mark.verl
def test_the_committed_keys_of_the_installed_verl_are_those_of_its_sources():
    """derive.py, run on the sources at hand, gives the committed list."""
    import importlib.util

    package = Path(importlib.util.find_spec("verl").origin).parent
    script = stacks.STACKS / "keys" / "derive.py"
    made = subprocess.run([sys.executable, script, package], capture_output=True, text=True, check=True).stdout
    assert made == (stacks.STACKS / "keys" / "verl-0.7.0.txt").read_text()
