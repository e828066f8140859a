"""Training from recorded answers: bitwise the same training, without generation; made-up answers train too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trainer_assets import make_assets, recipe_tree, write_plan

from atlasrl import checkpoints
from atlasrl.errors import Fault, UsageFault
from atlasrl.precision import weights
from atlasrl.rundir import RunDir, read_json_lines

pytestmark = pytest.mark.verl

PYLIB = Path(__file__).parents[2] / "pylib"


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"))


def train(path: Path, assets, **changes) -> tuple[RunDir, int, str]:
    run = write_plan(path, recipe_tree(assets, **changes), assets)
    command = [sys.executable, "-m", "atlasrl.trainer", str(run.path), "--attempt", "1"]
    environment = {**os.environ, "PYTHONPATH": str(PYLIB), "OMP_NUM_THREADS": "1"}
    file = run.path / "log"
    with file.open("w") as log:  # no pipe: what a Ray that did not come up leaves behind would hold it open
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=500).returncode
    return run, code, file.read_text()


def metric(run: RunDir, name: str) -> list[float]:
    return [line["data"][name] for line in read_json_lines(run.attempt(1).metrics) if name in line["data"]]


def trained_tensors(run: RunDir) -> dict:
    import torch

    step = checkpoints.choose(run).path
    flat = {}
    for file in sorted((step / "actor").glob("*_rank_*.pt")):
        if not file.name.startswith("extra"):
            _flatten(torch.load(file, weights_only=False), file.name, flat)
    return flat


def _flatten(tree, name, flat):
    if isinstance(tree, dict):
        for key, value in tree.items():
            _flatten(value, f"{name}/{key}", flat)
    elif hasattr(tree, "numpy") or hasattr(tree, "to_local"):
        flat[name] = (tree.to_local() if hasattr(tree, "to_local") else tree).numpy().tobytes()


def assert_weights_came_over(run: RunDir):
    """The digests of both syncs: the rollout got what training had, and training moved in between."""
    [syncs] = weights.read(run.attempt(1).weights).values()
    assert [line["sync"] for line in syncs] == [1, 2]
    assert list(weights.suspicions(syncs)) == []
    assert len(syncs[0]["sent"]) == len(syncs[0]["after"]) > 30
    assert all(unmoved.endswith("e_score_correction_bias") for unmoved in weights.unmoved(syncs))


@pytest.mark.nightly
@pytest.mark.training
def test_replayed_steps_end_in_bitwise_the_same_weights_and_moments(tmp_path, assets):
    original, code, log = train(tmp_path / "original", assets, rollout__record=True, probe__syncs=2)
    assert code == 0, log
    assert_weights_came_over(original)
    replayed, code, log = train(tmp_path / "replayed", assets, rollout__replay=str(original.path))
    assert code == 0, log
    assert "nothing is generated" in log

    assert not replayed.attempt(1).weights.exists(), "nothing is synchronised"

    expected = trained_tensors(original)
    assert len(expected) > 100 and trained_tensors(replayed) == expected
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/score/mean", "training/rollout_actor_log_prob_gap"):
        assert metric(replayed, name) == metric(original, name)
    samples = [list(read_json_lines(run.attempt(1).samples)) for run in (original, replayed)]
    assert samples[0] == samples[1]
    assert max(metric(replayed, "timing_s/gen")) < min(metric(original, "timing_s/gen"))


@pytest.mark.nightly
def test_made_up_answers_train_without_an_engine(tmp_path, assets):
    run, code, log = train(
        tmp_path / "stub", assets, rollout__stub={"median_tokens": 3, "spread": 0.5}, devices_per_node=2
    )
    assert code == 0, log
    assert all(norm > 0 for norm in metric(run, "actor/grad_norm"))


# -- the parts, without a job ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(assets):
    """verl's config and tokenizer of the small recipe, with a dataset's prompts."""
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from verl.utils import hf_tokenizer

    rollout = {"prompt_length": 8, "response_length": 40, "calculate_log_probs": True, "temperature": 1.0, "top_p": 1.0}
    config = OmegaConf.create({"data": {"seed": 7}, "actor_rollout_ref": {"rollout": rollout}})
    return config, hf_tokenizer(str(assets["model"]))


def batch(prompts: list[str], samples: int, **info):
    import torch
    from verl import DataProto

    chats = np.empty(len(prompts), object)
    chats[:] = [[{"role": "user", "content": text}] for text in prompts]
    rows = DataProto.from_dict({"dummy": torch.zeros(len(prompts), 1)}, {"raw_prompt": chats}, info)
    return rows.repeat(samples, interleave=True)


def test_made_up_lengths_follow_the_distribution_and_every_group_is_mixed(parts):
    from atlasrl.recipe import Stub
    from atlasrl.trainer.offline import StubRollouts, StubScorer

    manager = StubRollouts(*parts, Stub(median_tokens=10, spread=0.5))
    answers = manager.generate_sequences(batch(["12", "34"] * 100, 4, global_steps=1))
    lengths = answers.batch["response_mask"].sum(1).float()
    assert 9 <= lengths.median() <= 11
    assert 0.4 < lengths.log().std() < 0.6
    assert "rollout_log_probs" not in answers.batch
    again = manager.generate_sequences(batch(["12", "34"] * 100, 4, global_steps=1))
    assert again.batch["responses"].equal(answers.batch["responses"])
    scored = StubScorer()(answers, return_dict=True)
    groups = scored["reward_tensor"].sum(1).reshape(-1, 4)
    assert (groups.min(1).values == -1).all() and (groups.max(1).values == 1).all()


def test_a_changed_chat_template_or_another_prompt_is_refused(parts, tmp_path):
    from copy import deepcopy

    from atlasrl.precision.rollouts import Recording, write
    from atlasrl.recipe import Stub
    from atlasrl.trainer.offline import ReplayedRollouts, StubRollouts, generation_of

    config, tokenizer = parts
    ids = ["0:aaaaaaaaaaaa", "1:bbbbbbbbbbbb"]
    answers = StubRollouts(config, tokenizer, Stub(median_tokens=3)).generate_sequences(batch(["12", "34"], 2))
    write(tmp_path, Recording(1, [generation_of(ids, answers)], {"weights": None}))
    recipe = type("Recipe", (), {"steps": 1, "rollout": type("Rollout", (), {"replay": tmp_path, "samples": 2})})

    asked = {"global_steps": 1, "generation": 1, "prompt_ids": ids}
    replayed = ReplayedRollouts(config, tokenizer, recipe).generate_sequences(batch(["12", "34"], 2, **asked))
    for name in answers.batch.keys():  # noqa: SIM118  a TensorDict
        assert replayed.batch[name].equal(answers.batch[name])
    np.testing.assert_array_equal(replayed.non_tensor_batch["__num_turns__"], answers.non_tensor_batch["__num_turns__"])

    other = deepcopy(tokenizer)
    other.chat_template = other.chat_template.replace("}={%", "}+{%")
    with pytest.raises(Fault, match="the tokenizer or its chat template differs"):
        ReplayedRollouts(config, other, recipe).generate_sequences(batch(["12", "34"], 2, **asked))
    with pytest.raises(Fault, match="other data, another seed or another batch size"):
        ReplayedRollouts(config, tokenizer, recipe).generate_sequences(
            batch(["12", "35"], 2, **asked | {"prompt_ids": [ids[0], "1:cccccccccccc"]})
        )


def test_answers_come_from_one_place_only(assets):
    from atlasrl import recipe as recipes

    with pytest.raises(UsageFault, match="record, replay and stub exclude each other"):
        recipes.parse(recipe_tree(assets, rollout__record=True, rollout__replay="/runs/a"), "test")
