"""How an attempt ends is told by its exit code and one line."""

from __future__ import annotations

import json

import pytest
from trainer_assets import recipe_tree

from atlasrl.errors import Fault
from atlasrl.recipe import parse
from atlasrl.rundir import RunDir
from atlasrl.trainer import __main__ as trainer
from atlasrl.trainer import setup
from atlasrl.trainer.dapo import Exhausted


@pytest.fixture
def run(tmp_path):
    made = RunDir(tmp_path / "r")
    made.path.mkdir()
    paths = {name: tmp_path / name for name in ("model", "train.parquet", "reward.py")}
    tree = parse(recipe_tree(paths, steps=3), "test").model_dump(mode="json")
    made.plan.write_text(json.dumps({"recipe": tree, "nodes": 1, "devices_per_node": 1, "overrides": []}))
    return made


class FitThatEnds:
    """A trainer whose fit returns, or raises, after some steps."""

    def __init__(self, done, problem=None):
        self.global_steps, self.problem = done + 1, problem

    def init_workers(self):
        pass

    def fit(self):
        if self.problem:
            raise self.problem

    def judge(self, done):
        pass


@pytest.fixture
def ends(run, monkeypatch, capsys):
    def end(done=3, problem=None):
        monkeypatch.setattr(setup, "connect", lambda plan, recipe: None)
        monkeypatch.setattr(setup, "prepare_environment", lambda *a, **k: None)
        monkeypatch.setattr(setup, "build_trainer", lambda *a: FitThatEnds(done, problem))
        code = trainer.main([str(run.path), "--attempt", "1"])
        return code, capsys.readouterr()

    return end


def test_all_steps_done_is_success(ends):
    code, said = ends(done=3)
    assert code == 0
    assert "done: 3 steps" in said.out


@pytest.mark.parametrize("done", [0, 2])
def test_a_loop_that_ends_early_without_an_error_is_a_failure(ends, done):
    """verl returns normally when its dataloader runs dry, for example after a resume at an epoch's end."""
    code, said = ends(done=done)
    assert code == 1
    assert f"ended after step {done} of 3" in said.err


def test_a_fault_is_one_line_without_a_traceback(ends):
    code, said = ends(problem=Fault("disk full"))
    assert (code, said.err) == (1, "error: disk full\n")


def test_exhausted_sampling_has_its_own_code(ends):
    assert ends(problem=Exhausted("0 of 8"))[0] == 86


def test_a_fault_in_a_worker_is_found_behind_ray_s_wrapping(ends):
    class RayTaskError(RuntimeError):
        cause = Fault("worker 1: tensor w differs")

    code, said = ends(problem=RayTaskError("remote traceback"))
    assert (code, said.err) == (1, "error: worker 1: tensor w differs\n")


def test_anything_else_is_a_crash_with_its_traceback(ends):
    code, said = ends(problem=ZeroDivisionError("division by zero"))
    assert code == trainer.CRASH
    assert "Traceback" in said.err
    assert code not in (0, 1, 85, 86)


def test_a_damaged_plan_is_not_a_success(run, capsys):
    run.plan.write_text("{}")
    assert trainer.main([str(run.path), "--attempt", "1"]) == trainer.CRASH


def test_an_environment_that_names_plugins_keeps_them(monkeypatch, run):
    recipe = parse(json.loads(run.plan.read_text())["recipe"], "test")
    monkeypatch.setenv(setup.PLUGINS, "site.plugin,atlasrl.trainer.cpu")
    for name in ("TENSORBOARD_DIR", "VERL_FILE_LOGGER_PATH", "ATLASRL_FIRST_STEP"):
        monkeypatch.setenv(name, "")
    setup.prepare_environment({"environment": {}}, recipe, run.attempt(1), first_step=5)
    import os

    assert os.environ[setup.PLUGINS] == "site.plugin,atlasrl.trainer.cpu,atlasrl.trainer.fsdp2_plugin"
    assert os.environ["ATLASRL_FIRST_STEP"] == "5"


@pytest.mark.verl
def test_a_verl_whose_trainer_takes_no_reward_function_is_refused_by_name():
    """The signature of verl 0.7.1; of 0.7.0 is the one installed here."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from atlasrl.trainer.setup import require_known_trainer

    class Newer:
        def __init__(self, config, tokenizer, role_worker_mapping, resource_pool_manager):
            pass

    require_known_trainer(RayPPOTrainer)
    with pytest.raises(Fault, match="takes no reward_fn and no val_reward_fn"):
        require_known_trainer(Newer)
