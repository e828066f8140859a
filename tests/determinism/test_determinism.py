"""The variables of a deterministic run, and the proof that a process has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atlasrl import determinism

PYLIB = Path(__file__).resolve().parents[2] / "pylib"


@pytest.mark.parametrize("device", ["npu", "cuda", "cpu"])
def test_every_variable_has_a_value_and_a_reason(device):
    for name, (value, reason) in determinism.environment(device).items():
        assert name.isupper() and value and len(reason) > 10


def test_hccl_and_lccl_have_their_own_set():
    hccl, lccl = determinism.environment("npu"), determinism.environment("npu", "AIV")
    assert hccl["HCCL_DETERMINISTIC"][0] == "true" and "LCCL_DETERMINISTIC" not in hccl
    assert lccl["LCCL_DETERMINISTIC"][0] == "1" and "HCCL_DETERMINISTIC" not in lccl
    assert lccl["ATB_LLM_LCOC_ENABLE"][0] == "0"


def test_a_change_of_what_was_returned_stays_with_the_caller():
    determinism.environment("npu")["HCCL_DETERMINISTIC"] = ("false", "a plan's own wish")
    assert determinism.environment("npu")["HCCL_DETERMINISTIC"][0] == "true"


PROOF = """
from atlasrl import determinism
print(determinism.missing("cpu"))
determinism.settle()
print(determinism.missing("cpu"))
"""


def said(**changes: str) -> list[str]:
    planned = {name: value for name, (value, _) in determinism.environment("cpu").items()}
    env = {**os.environ, "PYTHONPATH": str(PYLIB), **planned, **changes}
    return subprocess.run(
        [sys.executable, "-c", PROOF], env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.verl
def test_a_process_proves_itself_and_names_what_it_lacks():
    torch_off = "torch.use_deterministic_algorithms is off in this process"
    assert said() == [str([torch_off]), "[]"]
    hash_seed = "PYTHONHASHSEED is random and must be 0"
    assert said(PYTHONHASHSEED="random") == [str([hash_seed, torch_off]), str([hash_seed])]
