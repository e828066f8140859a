"""The guides name only commands, options, recipe keys, files and targets that exist, the same in both languages."""

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ["docs/guide.md", "docs/guide.zh-CN.md", "README.zh-CN.md", "docs/doctor.md", "docs/k8s.md"]


def commands(file: str) -> list[list[str]]:
    """The indented command lines of a page, continued lines joined, comments and variables before them left out."""
    text = re.sub(r"\s*\\\n\s*", " ", (ROOT / file).read_text())
    lines = re.findall(r"^ {4,}((?:\w+=\S+ )?(?:bin/\w|make |env/setup)[^\n]*)", text, re.MULTILINE)
    return [shlex.split(line.split("  ")[0] if "#" not in line else line, comments=True) for line in lines]


def click_command(words: list[str]) -> tuple[click.Command, list[str]]:
    verb, rest = words[0].removeprefix("bin/"), words[1:]
    module = "ckpt_tools.cli" if verb == "ckpt" else f"atlasrl.cli.{verb}"
    command = importlib.import_module(module).main
    while isinstance(command, click.Group):
        name = rest[0] if rest[0] in command.commands else "fit"  # bin/memory RECIPE
        rest = rest[1:] if rest[0] in command.commands else rest
        command = command.commands[name]
    return command, rest


@pytest.mark.parametrize("file", GUIDES)
def test_each_command_and_each_of_its_options_exist(file):
    for words in commands(file):
        if words[0].startswith("bin/") and words[0] != "bin/tensorboard":
            assert (ROOT / words[0]).is_file(), words
            command, rest = click_command(words)
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            unknown = {word for word in rest if re.match(r"-", word)} - known
            assert not unknown, f"{shlex.join(words)}: {unknown}"


@pytest.mark.parametrize("file", GUIDES)
def test_each_change_of_a_recipe_is_one_that_the_schema_takes(file):
    from atlasrl import recipe as recipes

    for words in commands(file):
        if words[0] in ("bin/train", "bin/k8s") and "--resume" not in words:
            changes = [words[number + 1] for number, word in enumerate(words) if word == "--set"]
            recipes.load(words[1], changes)


@pytest.mark.parametrize("file", GUIDES)
def test_each_target_of_make_exists(file):
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(file):
        if words[0] == "make":
            assert words[1] in targets, words


@pytest.mark.parametrize("file", GUIDES)
def test_each_link_leads_to_a_file(file):
    page = ROOT / file
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_both_languages_name_the_same_commands():
    assert commands("docs/guide.md") == commands("docs/guide.zh-CN.md")
    assert len(commands("docs/guide.md")) > 20


def test_the_milestones_plan_on_their_nodes(tmp_path):
    """Splits divide the nodes they are given, for each multi-node command of the guide."""
    from atlasrl import plan as plans
    from atlasrl import recipe as recipes
    from atlasrl.rundir import RunDir
    from atlasrl.site import Site

    planned = 0
    for words in commands("docs/guide.md"):
        if words[0] == "bin/train" and words[1] != "tiny" and "--nodes" in words:
            changes = [words[number + 1] for number, word in enumerate(words) if word == "--set"]
            nodes = int(words[words.index("--nodes") + 1])
            plans.make(recipes.load(words[1], changes), Site(kind="slurm"), RunDir(tmp_path / "run"), nodes=nodes)
            planned += 1
    assert planned >= 4
