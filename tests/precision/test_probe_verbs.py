"""bin/probe's verbs of one run: what they print and how they exit."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from atlasrl.cli.probe import main
from atlasrl.rundir import RunDir


def probe(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run_with_samples(path, order, seed=1, tokens="t"):
    run = RunDir(path)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    run.plan.write_text(json.dumps({"recipe": {"seed": seed}}))
    with attempt.samples.open("w") as lines:
        for step in range(12):
            drawn = order[step * 4 : step * 4 + 4]
            record = {
                "step": step + 1,
                "prompt_ids": [f"{row}:{row:012x}" for row in drawn],
                "prompt_tokens": [f"{tokens}{row}" for row in drawn],
                "responses": "r",
            }
            lines.write(json.dumps(record) + "\n")
    return run.path


def test_data_of_equal_runs(tmp_path):
    sides = [run_with_samples(tmp_path / name, range(48)) for name in "ab"]
    done = probe("data", *sides)
    assert done.exit_code == 0 and "first steps 1–10: the same prompts in the same order" in done.output
    assert "no difference in the data" in done.output


def test_data_in_another_order_is_a_finding_only_for_equal_seeds(tmp_path):
    base = run_with_samples(tmp_path / "a", range(48))
    assert probe("data", run_with_samples(tmp_path / "b", range(47, -1, -1)), base).exit_code == 1
    other = probe("data", run_with_samples(tmp_path / "c", range(47, -1, -1), seed=2), base)
    assert other.exit_code == 0 and "another order is meant" in other.output
    told = json.loads(probe("data", run_with_samples(tmp_path / "d", range(48), tokens="u"), base, "--json").output)
    assert [each["cause"] for each in told["differences"]] == ["tokens"]


def watched(tmp_path, after):
    run = RunDir(tmp_path / "run")
    folder = run.attempt(1).weights
    folder.mkdir(parents=True)
    line = {"sync": 1, "sent": {"a": ["11", 1.0], "b": ["22", 2.0]}, "before": {"a": ["00", 0.1], "b": ["00", 0.1]}}
    (folder / "worker-0.jsonl").write_text(json.dumps({**line, "after": after, "stale": []}) + "\n")
    return run.path


@pytest.mark.verl
def test_weights_that_came_over_and_one_that_did_not(tmp_path):
    good = probe("weights", watched(tmp_path / "good", {"a": ["11", 1.0], "b": ["22", 2.0]}))
    assert good.exit_code == 0 and "1 syncs of 2 tensors, 0 suspicious" in good.output
    bad = probe("weights", watched(tmp_path / "bad", {"a": ["11", 1.0], "b": ["00", 0.1]}), "--tensor", "b")
    assert bad.exit_code == 1
    assert "sync 1: b differs between training and rollout after the sync" in bad.output
    assert [line.split()[:2] for line in bad.output.splitlines()[1:4]] == [
        ["init", "rollout"],
        ["sync", "1"],
        ["after", "1"],
    ]


def test_a_run_that_is_not_there_is_usage(tmp_path):
    done = probe("data", "nothing", "nothing", "--runs", tmp_path)
    assert done.exit_code == 2 and "no run 'nothing'" in done.output


def test_a_vllm_engine_is_built_as_verl_builds_it():
    from atlasrl import recipe as recipes
    from atlasrl.precision import infer

    recipe = recipes.load("deepseek-v3-671b-dapo")
    arguments = infer.vllm_arguments(recipe, "/model")
    assert arguments["tensor_parallel_size"] == recipe.rollout.tensor
    assert arguments["enable_expert_parallel"] and arguments["enforce_eager"]
    assert arguments["max_model_len"] == recipe.data.max_prompt_tokens + recipe.data.max_response_tokens
    assert infer.data_ranks(recipe) * recipe.rollout.tensor == recipe.rollout.expert
    graph = recipes.load("deepseek-v3-671b-dapo", ["rollout.graph=torchair"])
    arguments = infer.vllm_arguments(graph, "/model")
    assert not arguments["enforce_eager"] and arguments["additional_config"]["torchair_graph_config"]["enabled"]
