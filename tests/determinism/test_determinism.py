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
import os
os.environ["PYTHONHASHSEED"] = "0"
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
    wrong, late = "MKL_CBWR is AUTO and must be COMPATIBLE", "PYTHONHASHSEED was set after Python had started"
    assert said(PYTHONHASHSEED="random", MKL_CBWR="AUTO") == [str([wrong, late, torch_off]), str([wrong, late])]


# -- in a plan --------------------------------------------------------------------------------------


def planned(*changes: str, name: str = "deepseek-v3-671b-dapo") -> dict[str, str]:
    from atlasrl import plan, recipe, site
    from atlasrl.rundir import RunDir

    made = plan.make(recipe.load(name, list(changes)), site.load("slurm"), RunDir("/r"))
    return {name: value.value for name, value in made.environment.items()}


def test_a_deterministic_recipe_plans_the_whole_set_and_another_none_of_it():
    wanted = {name: value for name, (value, _) in determinism.environment("npu").items()}
    assert planned("deterministic=true").items() >= wanted.items()
    assert not planned().keys() & wanted.keys()


def test_the_set_of_lccl_is_planned_where_the_recipe_uses_its_collectives():
    environment = planned("deterministic=true", "environment.HCCL_OP_EXPANSION_MODE=AIV")
    assert environment["LCCL_DETERMINISTIC"] == "1" and "HCCL_DETERMINISTIC" not in environment


def test_every_process_is_told_after_its_device_and_backend():
    from atlasrl import recipe
    from atlasrl.trainer import setup

    assert setup.plugins(recipe.load("tiny", ["deterministic=true"]))[-1] == "atlasrl.trainer.deterministic_plugin"
    assert "atlasrl.trainer.deterministic_plugin" not in setup.plugins(recipe.load("tiny"))


# -- on workers -------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.cluster
def test_a_worker_without_the_set_is_named_before_the_first_step(tmp_path):
    script = f"""
import ray
from atlasrl import determinism
determinism.settle()
variables = {{name: value for name, (value, _) in determinism.environment("cpu").items()}}
path = {{"PYTHONPATH": {str(PYLIB)!r}}}
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
class Worker:
    def __init__(self):
        from atlasrl.trainer import deterministic_plugin
Worker = ray.remote(Worker)
good = Worker.options(runtime_env={{"env_vars": {{**variables, **path}}}}).remote()
bad = Worker.options(runtime_env={{"env_vars": {{**variables, **path, "MKL_CBWR": "AUTO"}}}}).remote()
determinism.prove("cpu", {{"worker 0": good}})
print("proven", flush=True)
try:
    determinism.prove("cpu", {{"worker 0": good, "worker 1": bad}})
except determinism.Fault as fault:
    print(fault)
"""
    variables = {name: value for name, (value, _) in determinism.environment("cpu").items()}
    env = {**os.environ, **variables, "PYTHONPATH": str(PYLIB)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == "proven", done.stderr
    told = done.stdout.splitlines()[1]
    assert "1 of 3 processes are not (worker 1); worker 1: MKL_CBWR is AUTO and must be COMPATIBLE" in told
