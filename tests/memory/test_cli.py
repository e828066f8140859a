"""bin/memory: exit codes that mean something, JSON with everything, a picture that is safe."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from atlasrl import recipe as recipes
from atlasrl.cli.memory import main
from atlasrl.errors import Fault
from atlasrl.memory import architecture, measured, workers
from atlasrl.memory.terms import PHASES, TERMS

RECIPE = "deepseek-v3-671b-dapo"
TOO_MUCH = ["--set", "parallel.recompute=none"]


SMALL = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def memory(*arguments: str):
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def test_a_recipe_that_fits():
    result = memory(RECIPE)
    assert result.exit_code == 0
    assert "fits: rollout on stage" in result.output
    assert "KV cache: 147,200 tokens" in result.output


def test_a_recipe_that_does_not_fit_names_the_place_and_three_remedies():
    result = memory(RECIPE, *TOO_MUCH)
    assert result.exit_code == 1
    assert "does not fit: update on stage 1" in result.output
    remedies = result.output[result.output.index("cheapest remedies") :].splitlines()[1:]
    assert len(remedies) == 3
    assert "parallel.recompute=full" in remedies[0] or "parallel.recompute=full" in "".join(remedies)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-recipe"], "no recipe"),
        ([RECIPE, "--nodes", "31"], "no multiple"),
        ([RECIPE, "--set", "model.path=/models/Unheard-Of"], "pass --config FILE"),
        ([RECIPE, "--config", "/nonexistent/config.json"], "cannot be read"),
        ([RECIPE, "--set", "environment.HCCL_BUFFSIZE=much"], "whole number of megabytes"),
        ([RECIPE, "--set", "device=cpu"], "predicted for expert parallelism only"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line_and_exit_2(arguments, words):
    result = memory(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_json_holds_every_term_and_adds_up():
    tree = json.loads(memory(RECIPE, *TOO_MUCH, "--json").output)
    assert not tree["fits"]
    assert [stage["stage"] for stage in tree["stages"]] == list(range(16))
    highest = max(sum(terms.values()) for stage in tree["stages"] for terms in stage["phases"].values())
    assert tree["tightest"]["bytes"] == highest
    used = {term for stage in tree["stages"] for terms in stage["phases"].values() for term in terms}
    assert used <= set(tree["terms"])
    assert all(each[part] for each in tree["terms"].values() for part in ("formula", "source", "why"))


def test_every_phase_and_term_the_model_knows_is_explained():
    tree = json.loads(memory(RECIPE, "--set", 'verl={"actor_rollout_ref.actor.use_kl_loss": true}', "--json").output)
    phases = {phase for stage in tree["stages"] for phase in stage["phases"]}
    assert phases == set(PHASES)
    assert {term for stage in tree["stages"] for terms in stage["phases"].values() for term in terms} <= set(TERMS)


def test_a_reference_model_costs_what_its_weights_cost():
    plain = json.loads(memory(RECIPE, "--set", "parallel.offload=false", "--json").output)
    with_reference = json.loads(
        memory(
            RECIPE,
            "--set",
            "parallel.offload=false",
            "--set",
            "verl.actor_rollout_ref.actor.use_kl_loss=true",
            "--json",
        ).output
    )
    before, after = (sum(tree["stages"][1]["phases"]["update"].values()) for tree in (plain, with_reference))
    assert after - before == plain["stages"][1]["phases"]["update"]["weights"]


def test_the_picture_shows_every_stage_and_escapes(tmp_path):
    page = tmp_path / "memory.html"
    assert memory(RECIPE, "--html", str(page)).exit_code == 0
    text = page.read_text()
    assert text.count(">stage 15 ") == len(re.findall("<svg", text)) == 5
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org", "")


def test_search_prints_the_cheapest_and_the_recipes_own_rank():
    result = memory("search", RECIPE, "--nodes", "32", "--limit", "3")
    assert result.exit_code == 0
    assert "is number" in result.output
    assert max(map(len, result.output.splitlines())) <= 110
    found = json.loads(memory("search", RECIPE, "--nodes", "32", "--limit", "5", "--json").output)
    assert [c["total_seconds"] for c in found] == sorted(c["total_seconds"] for c in found)


def test_search_without_any_split_that_fits():
    result = memory("search", RECIPE, "--nodes", "32", "--device-gib", "20")
    assert result.exit_code == 1
    assert "no legal split fits" in result.output


def test_an_fsdp2_recipe_prints_its_workers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    result = memory("tiny", "--set", "backend=fsdp2", "--set", "parallel.expert=1", "--config", str(tmp_path))
    assert result.exit_code == 0
    assert "each worker" in result.output


@pytest.mark.parametrize("split", ["parallel.tensor=2", "parallel.pipeline=2", "model.compute_dtype=bfloat16"])
def test_a_cpu_recipe_that_is_not_predicted_says_what_is(tmp_path, split):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    result = memory("tiny", "--set", split, "--set", "parallel.expert=1", "--config", str(tmp_path))
    assert result.exit_code == 2
    assert "predicted for" in result.output


def probed(changes: dict) -> str:
    """What is told of the one worker of a recipe that measured what is predicted of it, but for `changes`."""
    recipe = recipes.load("tiny", ["backend=fsdp2", "parallel.expert=1"])
    a = architecture.from_config(SMALL)
    held = workers.expected(recipe, a, 1, 0)
    sizes = dataclasses.asdict(held.tensors)
    logits = {"log_prob": sizes.pop("score_logits"), "update": sizes.pop("update_logits")}
    records = [
        {"phase": phase, "start": 10**8, "peak": 10**8 + held.growths[phase].total, "logits": logits[phase]}
        | {"tokens": 20, **sizes, **changes}
        for _ in range(2)
        for phase in ("log_prob", "update")
    ]
    return "\n".join(measured.lines(measured.compare(recipe, a, [records])))


def test_what_the_probe_wrote_is_set_beside_the_prediction():
    told = probed({})
    assert told.count("as predicted") == 6
    assert told.count("(+0.0%)") == 2


def test_a_worker_that_holds_something_else_is_shown():
    told = probed({"optimizer": 12345})
    assert told.count("as predicted") == 5
    assert re.search(r"optimizer +12,345 bytes, predicted", told)


@pytest.mark.parametrize(
    ("files", "words"), [(["rank1.jsonl"], r"ranks \[1\]"), (["rank0.jsonl", "rank2.jsonl"], r"ranks \[0, 2\]")]
)
def test_a_probe_folder_with_a_gap(tmp_path, files, words):
    for file in files:
        (tmp_path / file).write_text("")
    with pytest.raises(Fault, match=words):
        measured.read(tmp_path)


def test_help_imports_nothing_heavy():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "atlasrl.cli.memory", "--help"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(root / "pylib"), "PATH": ""},
    )
    assert done.returncode == 0
    heavy = {name for name in ("torch", "numpy", "pyarrow", "pydantic", "yaml") if f" {name}\n" in done.stderr}
    assert not heavy, f"--help imports {heavy}"
