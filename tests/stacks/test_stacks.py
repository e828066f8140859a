"""Stacks: complete, installable in order, and honest about what they can do."""

from __future__ import annotations

import copy
from importlib import metadata

import pytest

from atlasrl import recipe as recipes
from atlasrl import schema, stacks
from atlasrl.errors import UsageFault

NAMES = sorted(file.stem for file in stacks.STACKS.glob("*.yaml"))
MINIMAL = schema.read_yaml((stacks.STACKS / "cpu.yaml").read_text())


def test_every_default_is_a_stack_of_its_device():
    for device, name in stacks.DEFAULT.items():
        assert stacks.load(name).device == device


@pytest.mark.parametrize("name", NAMES)
def test_what_shadows_a_package_is_removed_before_it_is_installed_and_after_it_came(name):
    stack = stacks.load(name)
    order = [package for step in stack.install for package in step.packages]
    if "triton-ascend" not in order:
        assert stack.device != "npu"
        return
    step = next(step for step in stack.install if "triton-ascend" in step.packages)
    verbs = [command[0] for command in stack.commands(step)]
    assert verbs == ["uninstall", "install"]
    assert order.index("vllm") < order.index("triton-ascend")  # vllm brings triton
    assert order.index("torch") < order.index("vllm") < order.index("vllm-ascend")


@pytest.mark.parametrize("name", NAMES)
def test_no_step_can_pull_a_second_torch(name):
    """A step with dependencies may only follow the step that installed torch."""
    seen = set()
    for step in stacks.load(name).install:
        assert "torch" in seen | set(step.packages) or not step.packages
        seen |= set(step.packages)


@pytest.mark.parametrize("name", NAMES)
def test_an_air_gapped_site_installs_without_any_address(name, tmp_path):
    stack = stacks.load(name)
    for step in stack.install:
        for command in stack.commands(step, wheels=tmp_path):
            assert "://" not in " ".join(command)
            if command[0] == "install":
                assert "--no-index" in command


def test_a_git_package_is_installed_by_its_commit():
    stack = stacks.load("a2-article")
    assert stack.packages["verl"].requirement("verl").endswith("@e2d45b00e514e1fa914e32eeb9093226540b7560")


def test_the_cpu_stack_is_what_is_pinned_for_the_cpu():
    from atlasrl import installed

    pins = {name.lower(): version for name, version in installed.pins("cpu").items()}
    for name, package in stacks.load("cpu").packages.items():
        assert pins.get(name, metadata.version(name).partition("+")[0]) == package.version


def test_a_version_before_the_release_is_not_the_release():
    article, newer = stacks.load("a2-article"), stacks.load("a2-0.7.1")
    assert not article.within("verl", ">=0.7.0,<0.8")
    assert newer.within("verl", ">=0.7.0,<0.8")
    assert article.within("megatron-core", ">=0.12,<0.13.1")
    assert not article.within("flash-attn", ">=0")


def damaged(**changes):
    tree = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = tree
        for parent in parents:
            place = place[parent]
        place[last] = value
    return tree


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"capabilities__rollout": "fast"}, "rollout"),
        ({"capabilities__flys": True}, "flys"),
        ({"packages__torch": {"version": "new"}}, "no version number"),
        ({"packages__torch": {"version": "2.13.0", "git": "https://example.org/torch"}}, "belong together"),
        ({"packages__apex": {"version": "0.1"}}, "apex stands in 0"),
        ({"install": [{"name": "x", "packages": ["torch", "torch"]}]}, "torch stands in 2"),
        ({"install": [{"name": "x", "packages": ["jax"]}]}, "jax"),
    ],
)
def test_a_damaged_stack_is_refused_with_the_word_that_is_wrong(changes, word):
    with pytest.raises(UsageFault, match=word):
        schema.parse(stacks.Stack, damaged(**changes), "stack.yaml")


def test_a_misspelt_stack_names_the_nearest():
    with pytest.raises(UsageFault, match="did you mean a2-article"):
        stacks.load("a2-artikel")


def test_a_recipe_chooses_its_stack():
    tiny = recipes.load("tiny")
    assert stacks.of_recipe(tiny) == stacks.load("cpu")
    large = recipes.load("deepseek-v3-671b-dapo", ["stack=a2-article"])
    assert stacks.of_recipe(large).capabilities.rollout == "sync"
    assert stacks.of_recipe(recipes.load("deepseek-v3-671b-dapo", ["device=cuda"])) is None
