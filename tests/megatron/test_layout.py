"""Only layouts that a self-test has proven start on a CPU, and the refusal helps."""

from __future__ import annotations

import pytest

from atlasrl import recipe as recipes
from atlasrl.errors import UsageFault
from atlasrl.trainer import layout
from atlasrl.trainer.layout import Layout


def recipe(**parallel):
    return recipes.parse({"model": {"path": "/m"}, "data": {"train": "/d"}, "parallel": parallel}, "test")


def test_workers_that_the_split_does_not_divide_are_refused_with_the_arithmetic():
    with pytest.raises(UsageFault, match=r"tensor 2 × pipeline 2 × context 1 = 4 does not divide 6 workers"):
        layout.of_recipe(recipe(tensor=2, pipeline=2), 6)
    with pytest.raises(UsageFault, match=r"expert 4 × expert_tensor 2 × pipeline 1 = 8 does not divide 4 workers"):
        layout.of_recipe(recipe(expert=4, expert_tensor=2), 4)


def test_workers_that_the_split_leaves_become_replicas():
    assert layout.of_recipe(recipe(tensor=2, pipeline=2, expert=2), 8).data == 2
    assert layout.of_recipe(recipe(), 1) == Layout()


def test_an_unproven_layout_is_refused_and_the_nearest_proven_one_can_be_pasted():
    wished = layout.of_recipe(recipe(tensor=4), 4)
    with pytest.raises(UsageFault) as refused:
        layout.require_proven(wished)
    assert "TP4 on 4 workers is not proven" in str(refused.value)
    words = dict(word.rstrip(",").split("=") for word in str(refused.value).split() if "parallel." in word)
    named = {key.removeprefix("(").removeprefix("parallel."): int(value) for key, value in words.items()}
    layout.require_proven(layout.of_recipe(recipe(**named), 4))


def test_context_parallelism_is_never_called_proven():
    with pytest.raises(UsageFault, match="CP2"):
        layout.require_proven(layout.of_recipe(recipe(context=2), 2))


@pytest.mark.parametrize("known", layout.PROVEN, ids=lambda known: known.name)
def test_the_self_test_command_of_a_layout_asks_for_that_layout(known):
    from atlasrl.cli.selftest import main
    from atlasrl.selftest.cases import trials_of

    options = main.make_context("selftest", layout.flags(known).split()).params
    for name in ("debug", "rows", "as_json", "model", "batch", "record"):
        options.pop(name)
    (trial,) = trials_of(**options)
    assert trial.layout == known
