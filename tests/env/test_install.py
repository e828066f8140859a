"""A stack is installed in its order, once, from the network or from a folder; what breaks is named and continued."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from atlasrl import install, schema, stacks
from atlasrl.errors import Fault

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = schema.read_yaml((stacks.STACKS / "a2-0.7.1.yaml").read_text())["capabilities"]


def stack(**changes) -> stacks.Stack:
    tree = {
        "description": "test",
        "device": "npu",
        "python": "3.11",
        "capabilities": CAPABILITIES,
        "packages": {
            "torch": {"version": "2.7.1"},
            "vllm": {"version": "0.11.0", "git": "https://git.example/vllm", "commit": "v0.11.0"},
            "triton-ascend": {"version": "3.2.0"},
            "verl": {"version": "0.7.1"},
        },
        "install": [
            {"name": "CANN", "check": 'test -n "$CANN"', "note": "source its set_env.sh"},
            {"name": "torch", "packages": ["torch"]},
            {"name": "vllm", "packages": ["vllm"], "environment": {"VLLM_TARGET_DEVICE": "empty"}},
            {"name": "triton", "packages": ["triton-ascend"], "remove": ["triton"]},
            {
                "name": "verl",
                "packages": ["verl"],
                "dependencies": False,
                "requirements": "requirements-npu.txt",
                "clone": "https://git.example/verl@v0.7.1",
            },
        ],
    }
    return schema.parse(stacks.Stack, {**tree, **changes}, "test")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment folder whose Python and git write down what they were asked, and fail where told."""
    tools, said = tmp_path / "tools", tmp_path / "said"
    tools.mkdir()
    broken = f'while read -r word; do case "$*" in *"$word"*) echo "no: $word"; exit 1 ;; esac; done <{tmp_path}/broken'
    for name in ("python", "git"):
        words = f'echo "{name} $* target=$VLLM_TARGET_DEVICE" >>{said}'
        clone = 'case "$*" in *clone*--no-checkout*) mkdir -p "${@: -1}" ;; esac'
        (tools / name).write_text(f"#!/bin/bash\n{words}\n{clone}\n{broken}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "broken").write_text("")
    said.write_text("")
    venv = tmp_path / "venv"
    venv.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("CANN", "8.3")

    class Site:
        folder, broken = venv, tmp_path / "broken"

        def install(self, chosen=None, wheels=None) -> list[str]:
            said.write_text("")
            install.install(chosen or stack(), venv, python=str(tools / "python"), wheels=wheels)
            return said.read_text().splitlines()

        def said(self) -> list[str]:
            return said.read_text().splitlines()

    return Site()


def test_steps_come_in_the_stack_s_order_with_their_variables(site):
    lines = site.install()
    positions = [
        next(n for n, line in enumerate(lines) if word in line)
        for word in (
            "torch==",
            "vllm @ git+",
            "uninstall -y triton",
            "triton-ascend==",
            "clone",
            "requirements-npu.txt",
            "verl==0.7.1",
        )
    ]
    assert positions == sorted(positions)
    (vllm,) = [line for line in lines if "vllm @" in line]
    assert vllm.endswith("target=empty")
    assert all(line.endswith("target=") for line in lines if "vllm" not in line)
    assert "--no-deps" in lines[-1]


def test_no_later_step_may_replace_a_release_of_the_stack(site):
    lines = site.install()
    limits = (site.folder / "stack-constraints.txt").read_text().split()
    assert limits == ["torch==2.7.1", "triton-ascend==3.2.0", "verl==0.7.1"]  # vllm's commit says more than its version
    assert all(f"-c {site.folder}/stack-constraints.txt" in line for line in lines if " install " in line)


def test_a_second_call_does_nothing(site):
    assert site.install() and site.install() == []


def test_a_broken_step_is_named_and_continued_without_doing_the_others_again(site):
    site.broken.write_text("triton-ascend==\n")
    with pytest.raises(Fault, match=r"step 4 \(triton\) failed at .*triton-ascend==3.2.0`: no: .*continues here"):
        site.install()
    assert not any("verl==" in line for line in site.said())
    site.broken.write_text("")
    lines = site.install()
    assert not any("torch==" in line or "vllm @" in line for line in lines)
    assert "uninstall -y triton" in lines[0] and "verl==" in lines[-1]


def test_a_changed_step_is_done_again_and_all_after_it(site):
    site.install()
    later = stack(packages={**stack().model_dump()["packages"], "triton-ascend": {"version": "3.2.1"}})
    assert "torch==" in site.install(later)[0], "the versions that bind every step have changed"
    tree = [step.model_dump(exclude_defaults=True) for step in stack().install]
    tree[2]["environment"] = {"VLLM_TARGET_DEVICE": "none"}
    site.install()
    lines = site.install(stack(install=tree))
    assert "vllm @" in lines[0] and "verl==" in lines[-1]


def test_what_pip_cannot_install_is_asked_for_by_name(site, monkeypatch):
    monkeypatch.delenv("CANN")
    with pytest.raises(Fault, match=r"step 1 \(CANN\) failed .*source its set_env.sh"):
        site.install()
    assert site.said() == []


def test_from_a_folder_of_wheels_no_address_is_asked(site, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    lines = site.install(wheels=wheels)
    assert not any("://" in line or line.startswith("git") for line in lines)
    assert all("--no-index" in line for line in lines if " install " in line)
    assert any(f"-r {wheels}/verl-requirements-npu.txt" in line for line in lines)


def test_a_clone_that_was_cut_short_is_made_again(site):
    site.broken.write_text("--no-checkout\n")
    with pytest.raises(Fault, match=r"step 5 \(verl\)"):
        site.install()
    site.broken.write_text("")
    assert any("clone" in line for line in site.install())


@pytest.mark.parametrize("name", ["a2-article", "a2-0.7.0", "a2-0.7.1"])
def test_each_stack_of_ascend_can_be_installed(name, tmp_path):
    for wheels in (None, tmp_path):
        made = list(install.works(stacks.load(name), tmp_path, "python", wheels))
        assert made[0].name.startswith("CANN") and len(made) > 6
        assert all(work.commands for work in made)


@pytest.mark.parametrize("options", [["npu", "--stack", "a3"], ["npu", "--stack"], ["cpu", "--stack", "cpu"]])
def test_a_stack_that_is_none_is_one_line_and_nothing_is_made(options, tmp_path):
    done = subprocess.run(
        ["bash", str(ROOT / "env" / "setup.sh"), *options],
        env={**os.environ, "ATLASRL_VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --stack") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()
