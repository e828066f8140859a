"""A recipe is refused for what is wrong with it, and the message names the mend."""

from __future__ import annotations

import pytest
import yaml

from atlasrl import recipe as recipes
from atlasrl.errors import UsageFault

MINIMAL = {"model": {"path": "model"}, "data": {"train": "train.parquet"}}


def write(folder, tree) -> str:
    file = folder / "my.yaml"
    file.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return str(file)


def refusal(folder, tree, *changes) -> str:
    with pytest.raises(UsageFault) as caught:
        recipes.load(write(folder, tree), list(changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unknown_key_names_the_nearest_known_one(tmp_path):
    assert "dapo.clip_hgih; did you mean dapo.clip_high?" in refusal(tmp_path, {**MINIMAL, "dapo": {"clip_hgih": 0.3}})


def test_unknown_key_on_the_command_line_is_refused_as_well(tmp_path):
    assert "did you mean steps?" in refusal(tmp_path, MINIMAL, "step=3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("steps=abc", "steps"),
        ("steps=0", "steps"),
        ("rollout.top_p=1.5", "rollout.top_p"),
        ("backend=deepspeed", "backend"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate"),
    ],
)
def test_wrong_values_name_their_key(tmp_path, change, words):
    assert words in refusal(tmp_path, MINIMAL, change)


def test_recipe_without_inputs_must_name_model_and_data(tmp_path):
    assert "model.path" in refusal(tmp_path, {"steps": 3})


def test_change_without_equals_sign_shows_an_example(tmp_path):
    assert "key=value" in refusal(tmp_path, MINIMAL, "steps")


@pytest.mark.parametrize("text", ["[1, 2]", "a: b: c", "- x", "!!python/object/apply:os.system [id]"])
def test_files_that_are_no_recipe_are_refused_and_nothing_is_run(tmp_path, text):
    refusal(tmp_path, text)


def test_recipe_of_unknown_name_suggests_the_nearest(tmp_path):
    with pytest.raises(UsageFault, match="did you mean tiny"):
        recipes.load("tny")


def test_relative_paths_belong_to_the_recipe_and_changed_ones_to_the_caller(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    loaded = recipes.load(write(tmp_path, MINIMAL), ["data.val=val.parquet"])
    assert loaded.model.path == tmp_path / "model"
    assert loaded.data.val == elsewhere / "val.parquet"


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    assert recipes.load(write(tmp_path, MINIMAL), ["optimizer.learning_rate=5e-4"]).optimizer.learning_rate == 5e-4


def test_verl_keys_pass_through_with_their_dots(tmp_path):
    loaded = recipes.load(write(tmp_path, MINIMAL), ["verl.actor_rollout_ref.actor.entropy_coeff=0.1"])
    assert loaded.verl == {"actor_rollout_ref.actor.entropy_coeff": 0.1}


@pytest.mark.parametrize("name", [path.stem for path in recipes.RECIPES.glob("*.yaml")])
def test_every_shipped_recipe_loads(name):
    assert recipes.load(name).steps > 0
