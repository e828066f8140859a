"""The commands answer fast, refuse with exit code 2, and say what to do."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from tests.job.conftest import ROOT
from tests.job.test_plan import TREE

VERBS = sorted(path.name for path in (ROOT / "bin").iterdir() if path.name != "tensorboard")


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(TREE))
    return file


@pytest.mark.parametrize("verb", VERBS)
def test_help_needs_no_heavy_import(commands, verb):
    commands.environment["PYTHONPROFILEIMPORTTIME"] = "1"
    done = commands.run(verb, "--help")
    assert done.returncode == 0
    assert "Usage:" in done.stdout
    for heavy in ("torch", "ray", "verl", "transformers", "pandas", "pydantic"):
        assert f"| {heavy}\n" not in done.stderr, f"bin/{verb} --help imports {heavy}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nosuch"], "no recipe 'nosuch'"),
        (["SMALL", "--nodes", "0"], "at least 1"),
        (["SMALL", "--nodes", "900"], "900 nodes on this machine need about"),
        (["SMALL", "--name", "../out"], "cannot be a folder name"),
        (["SMALL", "--set", "stepz=3"], "did you mean steps"),
        (["SMALL", "--site", "mars"], "mars"),
    ],
)
def test_train_refuses_a_wrong_request_in_one_line(commands, recipe, options, words):
    done = commands.call("train", *[recipe if option == "SMALL" else option for option in options])
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(commands.runs.iterdir()) == []


def test_dry_run_prints_the_plan_and_makes_nothing(commands, recipe):
    done = commands.call("train", recipe, "--nodes", 2, "--dry-run")
    assert done.exit_code == 0
    assert "--node-name=node1" in done.stdout
    assert list(commands.runs.iterdir()) == []


def test_dry_run_as_json_is_the_plan_file(commands, recipe):
    plan = json.loads(commands.call("train", recipe, "--dry-run", "--json").stdout)
    assert plan["recipe"]["backend"] == "fsdp2"
    assert all(override["reason"] for override in plan["overrides"])


def test_existing_run_is_not_started_over(commands, recipe):
    (commands.runs / "mine").mkdir()
    done = commands.call("train", recipe, "--name", "mine")
    assert done.exit_code == 2
    assert "bin/resume mine" in done.stderr


@pytest.mark.parametrize("verb", ["resume", "stop", "logs", "status"])
def test_unknown_run_is_exit_1_and_lists_the_runs(commands, verb):
    done = commands.call(verb, "4711")
    assert done.exit_code == 1
    assert "no run and no job '4711'" in done.stderr


def test_status_of_no_runs_says_how_to_start_one(commands):
    assert "make train" in commands.call("status").stdout


def test_bin_without_environment_says_how_to_make_one(tmp_path):
    done = subprocess.run(
        [ROOT / "bin" / "status"],
        env={"PATH": "/usr/bin:/bin", "ATLASRL_VENV": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "env/setup.sh cpu" in done.stderr
