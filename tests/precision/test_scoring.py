"""Two reward rules over the same answers: every disagreement is found, whatever a rule does."""

from __future__ import annotations

import json
import time

import pytest

from atlasrl.errors import Fault, UsageFault
from atlasrl.precision import answers, scoring
from atlasrl.precision.scoring import Rule

STRICT = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {body}\n"


def rule(folder, name, body):
    file = folder / f"{name}.py"
    file.write_text(body if "def " in body else STRICT.format(body=body))
    return Rule.parse(str(file))


@pytest.fixture
def twelve(tmp_path):
    file = tmp_path / "step.jsonl"
    file.write_text("".join(json.dumps({"output": f"#{n}", "gts": str(n % 3)}) + "\n" for n in range(12)))
    return answers.read(file)


def test_equal_rules_in_other_words_agree(tmp_path, twelve):
    left = rule(tmp_path, "left", "{'score': 1.0 if solution_str == '#' + ground_truth else -1.0, 'acc': 1}")
    right = rule(tmp_path, "right", "(solution_str[1:] == ground_truth) * 2 - 1")
    assert scoring.compare(twelve, left, right) == []


def test_every_disagreement_is_listed_and_the_largest_first(tmp_path, twelve):
    left = rule(tmp_path, "left", "0.0")
    right = rule(tmp_path, "right", "{'#3': 0.5, '#7': 2.0}.get(solution_str, 0)")
    found = scoring.compare(twelve, left, right)
    assert [(each.answer.where, each.size) for each in found] == [("step.jsonl:8", 2.0), ("step.jsonl:4", 0.5)]
    assert "+0.2083" in scoring.text(12, found, ("a", "b"))


def test_a_rule_that_raises_hangs_or_kills_its_process_costs_that_answer_alone(tmp_path, twelve):
    body = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("noise on standard output")
    os.system("echo more noise")
    if solution_str == "#2": raise ValueError("two")
    if solution_str == "#4": time.sleep(3600)
    if solution_str == "#6": os._exit(9)
    if solution_str == "#8": raise SystemExit(0)
    return float("nan") if solution_str == "#10" else 1
"""
    began = time.monotonic()
    results = scoring.score(rule(tmp_path, "bad", body), twelve, seconds=3.0)
    assert time.monotonic() - began < 60
    assert [("error" in result) for result in results] == [n in (2, 4, 6, 8) for n in range(12)]
    assert results[2]["error"] == "ValueError: two" and "no score after" in results[4]["error"]
    assert "ended with 9" in results[6]["error"] and results[10] == {"score": "nan"}


def test_rules_of_one_module_name_do_not_meet(tmp_path, twelve):
    for side, value in (("a", 1), ("b", 2)):
        (tmp_path / side).mkdir()
        (tmp_path / side / "helper.py").write_text(f"VALUE = {value}\n")
    body = "import helper\n" + STRICT.format(body="helper.VALUE")
    found = scoring.compare(twelve, rule(tmp_path / "a", "reward", body), rule(tmp_path / "b", "reward", body))
    assert len(found) == 12 and {each.size for each in found} == {1.0}


def test_a_rule_that_cannot_be_loaded_is_told_in_one_line(tmp_path, twelve):
    with pytest.raises(Fault, match="cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"):
        scoring.score(rule(tmp_path, "r", "import no_such_package\ndef compute_score(): pass\n"), twelve)
    with pytest.raises(UsageFault, match="is no file"):
        Rule.parse("nowhere.py")


@pytest.mark.parametrize("line", ["{", "[]", '{"output": "x"}', "3"])
def test_a_line_that_is_no_answer_is_named(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"output": "x", "gts": "1"}\n' + line + "\n")
    with pytest.raises(UsageFault, match=r"a\.jsonl:2 is no answer"):
        answers.read(file)
