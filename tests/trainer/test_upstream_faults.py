"""Faults of verl 0.7.0 that we mend: each shows without the fix and is gone with it, on the real package."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.verl
pytest.importorskip("verl")

import torch  # noqa: E402
import upstream_cases  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from trainer_assets import make_assets, recipe_tree  # noqa: E402
from verl import DataProto  # noqa: E402

from atlasrl.errors import Fault  # noqa: E402
from atlasrl.recipe import parse  # noqa: E402
from atlasrl.rundir import RunDir  # noqa: E402
from atlasrl.trainer.overrides import verl_overrides  # noqa: E402
from atlasrl.trainer.scoring import Scorer, plain_columns  # noqa: E402

LENGTHS = [1, 3, 4, 6]
"""Answer lengths; the limit is 6 and the buffer 3, so that 0, 0, 1/3 and 3/3 of the penalty 0.5 are due."""
PENALTIES = [0.0, 0.0, -0.5 / 3, -0.5]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def tokenizer(assets):
    from verl.utils import hf_tokenizer

    return hf_tokenizer(str(assets["model"]))


@pytest.fixture(scope="module")
def config(assets):
    """verl's own YAML with our reward settings, without composing all of it."""
    recipe = parse(recipe_tree(assets), "test")
    made = verl_overrides(recipe, nodes=1, devices_per_node=1, model="/m", train="/t", val=None, run=RunDir("/r"))
    rewards = [o for o in made if "reward" in o.key]
    config = OmegaConf.create({"data": {"reward_fn_key": "data_source"}, "reward_manager": {"source": "register"}})
    for override in rewards:
        OmegaConf.update(config, override.key.lstrip("+"), override.value, force_add=True)
    config.custom_reward_function.name = "compute_score"
    return config


@pytest.fixture
def answers(tokenizer) -> DataProto:
    """Four right answers of LENGTHS to one prompt."""
    rows, width, room = len(LENGTHS), 2, 6
    responses = torch.full((rows, room), tokenizer.pad_token_id)
    mask = torch.ones((rows, width + room), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        responses[row, :length] = tokenizer.convert_tokens_to_ids("2")
        mask[row, width + length :] = 0
    prompts = torch.full((rows, width), tokenizer.convert_tokens_to_ids("1"))
    tensors = {"prompts": prompts, "responses": responses, "attention_mask": mask}
    columns = {
        "data_source": ["parity"] * rows,
        "reward_model": [{"style": "rule", "ground_truth": "2"}] * rows,
        "extra_info": [{} for _ in range(rows)],
    }
    return DataProto(
        batch=TensorDict(tensors, batch_size=rows),
        non_tensor_batch={name: np.array(values, dtype=object) for name, values in columns.items()},
    )


def manager(config, tokenizer):
    from verl.trainer.ppo.reward import load_reward_manager

    return load_reward_manager(config, tokenizer, num_examine=0, **config.reward_model.reward_kwargs)


def loop_scores(config, tokenizer, answers):
    """Scores of verl's reward loop, the default path of 0.7.0."""
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    async def scores():
        rule = DAPORewardManager(config, tokenizer, compute_score=get_custom_reward_fn(config))
        return [float((await rule.run_single(answers[i : i + 1]))["reward_score"]) for i in range(len(answers))]

    return asyncio.run(scores())


# -- A: overlong shaping silently off ---------------------------------------------------------------


def test_the_keys_of_upstream_s_recipe_shape_nothing(config, tokenizer, answers):
    upstream = OmegaConf.create(OmegaConf.to_container(config))
    upstream.reward_model.overlong_buffer = upstream.reward_model.reward_kwargs.overlong_buffer_cfg
    upstream.reward_model.reward_kwargs = {}
    assert loop_scores(upstream, tokenizer, answers) == [1.0] * 4


def test_our_keys_shape_in_the_trainer_and_in_the_reward_loop(config, tokenizer, answers):
    ours = Scorer(manager(config, tokenizer))(answers, return_dict=True)["reward_tensor"].sum(-1)
    torch.testing.assert_close(ours, 1 + torch.tensor(PENALTIES))
    assert loop_scores(config, tokenizer, answers) == pytest.approx(ours.tolist())


# -- B: a dump of shaped rewards raises -------------------------------------------------------------


def dump(trainer_class, folder, answers, columns, tokenizer):
    trainer = object.__new__(trainer_class)
    trainer.global_steps, trainer.tokenizer = 1, tokenizer
    answers.batch["token_level_scores"] = torch.diag(torch.tensor([1.0, 0.9, 0.8, 0.5]))[:, :4]
    trainer._log_rollout_data(answers, columns, {}, str(folder))
    return [json.loads(line) for line in (folder / "1.jsonl").read_text().splitlines()]


def test_verl_s_manager_reports_tensors_that_no_dump_survives(config, tokenizer, answers, tmp_path):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    columns = manager(config, tokenizer)(answers, return_dict=True)["reward_extra_info"]
    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        dump(RayPPOTrainer, tmp_path, answers, columns, tokenizer)


def test_our_columns_are_plain_and_one_per_answer(config, tokenizer, answers):
    columns = Scorer(manager(config, tokenizer))(answers, return_dict=True)["reward_extra_info"]
    assert columns["overlong_reward"] == pytest.approx(PENALTIES)
    assert columns["overlong"] == [False, False, True, True]
    json.dumps(columns)


def test_a_rule_that_forgets_a_key_is_named_before_training():
    with pytest.raises(Fault, match="returned 'acc' for 1 of 2 answers"):
        plain_columns({"acc": [1.0], "score": [1.0, 2.0]}, 2)


# -- C: the dump contradicts itself -----------------------------------------------------------------


def test_verl_s_dump_shows_the_reported_score_instead_of_the_one_trained_on(config, tokenizer, answers, tmp_path):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    columns = Scorer(manager(config, tokenizer))(answers, return_dict=True)["reward_extra_info"]
    rows = dump(RayPPOTrainer, tmp_path, answers, columns, tokenizer)
    assert [row["score"] for row in rows] == [1.0] * 4


def test_our_dump_keeps_both_and_every_row_is_true_to_its_own_output(config, tokenizer, answers, tmp_path):
    from atlasrl.trainer.dapo_trainer import DapoTrainer

    columns = Scorer(manager(config, tokenizer))(answers, return_dict=True)["reward_extra_info"]
    rows = dump(DapoTrainer, tmp_path, answers, columns, tokenizer)
    assert [row["score"] for row in rows] == pytest.approx([1.0, 0.9, 0.8, 0.5])
    assert [row["reported_score"] for row in rows] == [1.0] * 4
    assert [len(row["output"]) for row in rows] == LENGTHS
    assert [row["overlong"] for row in rows] == [length > 3 for length in LENGTHS]


# -- fixes are applied once per process, so each case runs in a process of its own -------------------


def apart(folder: Path, cases: list[partial], seconds: float = 120) -> list[tuple[int, str]]:
    """Run the cases side by side, each forked from a process that only imported verl; (exit code, output) of each.

    Forks of pytest's own process would inherit the fixes and the OpenMP threads of tests that ran before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["verl.utils.tracking", "torch.distributed.fsdp", "transformers.modeling_utils"])
    outputs = [folder / f"output-{number}" for number in range(len(cases))]
    children = [server.Process(target=upstream_cases.run, args=pair) for pair in zip(outputs, cases, strict=True)]
    for child in children:
        child.start()
    deadline = time.monotonic() + seconds
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.join()
    return [(child.exitcode, path.read_text()) for child, path in zip(children, outputs, strict=True)]


def log_and_die(folder: Path, first: int, last: int, *, numpy: bool = False, without: str = "") -> str:
    return apart(folder, [partial(upstream_cases.log_and_die, folder, first, last, numpy=numpy, without=without)])[0][1]


def curve(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0}).Reload()
    return [e.step for e in events.Scalars("a/b")] if "a/b" in events.Tags()["scalars"] else []


def test_a_killed_trainer_loses_no_logged_step_and_repeats_none(tmp_path):
    """Steps 1..4 are logged, the checkpoint is that of step 2: the resumed attempt logs 3 and 4 again."""
    log_and_die(tmp_path, 1, 5, numpy=True)
    assert curve(tmp_path) == [1, 2, 3, 4]
    log_and_die(tmp_path, 3, 6)
    assert curve(tmp_path) == [1, 2, 3, 4, 5]
    lines = (tmp_path / "metrics-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["data"]["a/c"] for line in lines] == [1.0, 2.0, 3.0, 4.0]


def test_without_the_fixes_steps_are_lost_or_repeated(tmp_path):
    log_and_die(tmp_path / "lost", 1, 5, without="tensorboard-flush,file-logger")
    assert curve(tmp_path / "lost") == []
    assert (tmp_path / "lost" / "metrics-1.jsonl").read_text() == ""
    log_and_die(tmp_path / "twice", 1, 5, without="tensorboard-purge")
    log_and_die(tmp_path / "twice", 3, 6, without="tensorboard-purge")
    assert curve(tmp_path / "twice") == [1, 2, 3, 4, 3, 4, 5]


def test_without_the_fix_a_numpy_scalar_ends_the_run(tmp_path):
    assert "float32 is not JSON serializable" in log_and_die(tmp_path, 1, 3, numpy=True, without="file-logger")


def both_workers(folder: Path, *, fixed: bool) -> list[tuple[int, str]]:
    folder.mkdir()
    return apart(folder, [partial(upstream_cases.expert_gradients, folder, rank, fixed=fixed) for rank in range(2)], 60)


def test_gradients_of_two_workers_are_exact_although_their_experts_differ(tmp_path):
    for status, output in both_workers(tmp_path / "fixed", fixed=True):
        assert status == 0, output
        assert float(output.split()[-1]) < 1e-4


def test_without_the_fix_idle_experts_break_the_collective(tmp_path):
    assert any(status != 0 for status, _ in both_workers(tmp_path / "broken", fixed=False))
