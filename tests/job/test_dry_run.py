"""`bin/train … --dry-run` of the 671B recipe prints the whole plan, exactly, for every A2 stack, as fast as a command.

After a wanted change: `ATLASRL_WRITE_GOLDEN=1 pytest tests/job/test_dry_run.py`, then read the difference.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atlasrl import control, stacks
from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl import site as sites
from atlasrl.rundir import RunDir

GOLDEN = Path(__file__).parent / "golden"
STACKS = ("a2-article", "a2-0.7.0", "a2-0.7.1")
LARGE = "deepseek-v3-671b-dapo"


@pytest.fixture(scope="module")
def preview():
    """The dry run of a stack, as on a cluster whose shared clone is /shared/atlasrl."""

    def made(stack: str) -> str:
        site = sites.load("slurm", ["python=/shared/atlasrl/env/python"])
        plan = plans.make(recipes.load(LARGE, [f"stack={stack}"]), site, RunDir("/shared/runs/first"), nodes=32)
        return (
            control.preview(plan).replace(str(plans.ROOT), "/shared/atlasrl").replace(sys.executable, "PYTHON") + "\n"
        )

    return made


@pytest.mark.parametrize("stack", STACKS)
def test_the_dry_run_is_exactly_this(preview, stack):
    golden = GOLDEN / f"{LARGE}.{stack}.txt"
    if os.environ.get("ATLASRL_WRITE_GOLDEN"):
        golden.write_text(preview(stack))
    assert preview(stack) == golden.read_text()


@pytest.mark.parametrize("stack", STACKS)
def test_nothing_is_left_out(preview, stack):
    text = preview(stack)
    for part in (
        "#SBATCH --nodes=32",
        "HCCL_CONNECT_TIMEOUT=1800",
        "node31: ",
        "--port=",
        "device memory fits",
        "  mla-rotary-key: with tensor parallelism",
        "\nlint\n",
    ):
        assert part in text, part
    assert f"stack        {stack}" in text


@pytest.mark.parametrize("stack", STACKS)
def test_the_settings_are_those_of_the_stack_s_own_verl(preview, stack):
    known = stacks.config_keys(stacks.load(stack), "megatron")
    keys = re.findall(r"^  (\+*)([a-z_.]+)=", preview(stack).partition("verl overrides")[2], re.MULTILINE)
    assert len(keys) > 80
    unknown = [name for plus, name in keys if not plus and name not in known]
    assert unknown == []


def test_the_default_stack_is_one_that_trains(preview):
    found = preview(stacks.DEFAULT["npu"]).partition("\nlint\n")[2].partition("batch script")[0]
    assert "error" not in found and "warning fresh-host-optimizer" in found


def test_a_fix_that_is_not_for_the_stack_says_so(preview):
    assert "weights-after-sync: vllm-ascend makes W_UV" in preview("a2-0.7.0")
    assert "weights-after-sync: not for verl 0.7.1, it mends >=0.7.0,<0.7.1" in preview("a2-0.7.1")


def test_it_takes_the_time_of_a_command():
    """Less than a second of processor time; what the wall clock says depends on who else works here."""
    script = (
        "import resource, sys\n"
        "from atlasrl.cli.train import main\n"
        f"sys.argv = ['bin/train', '{LARGE}', '--nodes', '32', '--site', 'slurm', '--dry-run']\n"
        "try:\n    main(prog_name='bin/train')\n"
        "except SystemExit:\n    pass\n"
        "heavy = sorted({'torch', 'ray', 'verl', 'transformers', 'pyarrow', 'pandas'} & sys.modules.keys())\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, heavy, file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(plans.ROOT / "pylib")}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    seconds, _, heavy = done.stderr.splitlines()[-1].partition(" ")
    assert heavy == "[]"
    assert float(seconds) < 2.0
