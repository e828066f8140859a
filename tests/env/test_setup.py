"""env/setup.sh says what it needs, stops at what fails, and goes on there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atlasrl import installed

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "env" / "setup.sh"


def setup(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SETUP), *options],
        env={**os.environ, "ATLASRL_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("options", [[], ["gpu"], ["cpu", "--wheels", "/no/such/folder"], ["cpu", "--fast"]])
def test_wrong_request_is_one_line_and_exit_2(options, tmp_path):
    done = setup(*options, ATLASRL_VENV=str(tmp_path / "venv"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "venv").exists()


def test_no_fitting_python_names_the_package_to_install(tmp_path):
    done = setup("cpu", ATLASRL_VENV=str(tmp_path / "venv"), ATLASRL_PYTHON="no-such-python")
    assert done.returncode == 1
    assert "apt-get install python3" in done.stderr


@pytest.mark.training
def test_failed_step_is_named_with_its_remedy_and_the_next_call_continues_there(tmp_path):
    empty = tmp_path / "wheels"
    empty.mkdir()
    venv = str(tmp_path / "venv")
    first = setup("npu", "--wheels", str(empty), ATLASRL_VENV=venv)
    assert first.returncode == 1
    assert "step 2 (libraries) failed" in first.stderr
    assert "--wheels DIR" in first.stderr
    second = setup("npu", "--wheels", str(empty), ATLASRL_VENV=venv)
    assert second.returncode == 1
    assert "[1/4]" not in second.stdout, "the environment was made twice"
    assert "[2/4]" in second.stdout


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_every_exported_variable_carries_its_reason(device):
    lines = (ROOT / "env" / f"{device}.env.sh").read_text().splitlines()
    exports = [line for line in lines if line and not line.startswith("#")]
    assert exports
    for line in exports:
        assert re.fullmatch(r"export \w+=\S+  # \S.*", line), line


def test_difference_of_versions_is_one_line_each(monkeypatch):
    monkeypatch.setattr(installed, "pins", lambda device: {"click": "0.0.1", "no-such-package": "1.0"})
    click, missing = installed.differences("cpu")
    assert click.startswith("click: 0.0.1 expected, ")
    assert missing == "no-such-package: 1.0 expected, not installed"
