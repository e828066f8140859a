"""The commands of the accuracy guide exist with the options it names, and both languages name the same."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
GUIDES = ("docs/accuracy.md", "docs/accuracy.zh-CN.md")
COMMAND = re.compile(r"bin/(?:probe|ablate|train|compare|status|selftest|ckpt)\b[^`\n>]*")


def commands(guide: str) -> list[str]:
    return [re.split(r"\s{3,}", found)[0].strip() for found in COMMAND.findall((ROOT / guide).read_text())]


def test_both_languages_name_the_same_commands():
    first, second = (sorted(commands(guide)) for guide in GUIDES)
    assert first == second and len(first) > 15


@pytest.mark.parametrize("line", sorted(set(commands(GUIDES[0]))))
def test_a_command_has_the_verb_and_the_options_that_the_guide_names(line):
    program, *words = shlex.split(line)
    module = program.removeprefix("bin/")
    if module == "ckpt":
        from ckpt_tools import cli

        command = cli.main
    else:
        command = importlib.import_module(f"atlasrl.cli.{module}").main
    if isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands
        command, words = command.commands[words[0]], words[1:]
    known = {option for each in command.params for option in each.opts}
    assert {word for word in words if word.startswith("--")} <= known
