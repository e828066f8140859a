"""The plan is pure, complete, and carries a reason for every derived value."""

from __future__ import annotations

import pytest

from atlasrl import control, machine, progress
from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl import site as sites
from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import RunDir

TREE = {
    "device": "cpu",
    "backend": "fsdp2",
    "devices_per_node": 1,
    "model": {"path": "/models/m"},
    "data": {"train": "/data/train.parquet", "max_prompt_tokens": 8, "max_response_tokens": 16},
    "rollout": {"engine": "cpu"},
    "dapo": {"overlong": {"buffer_tokens": 4}},
}


def make(run, *, nodes=2, site="local", **changes):
    tree = recipes.Recipe.model_validate({**TREE, **changes})
    return plans.make(tree, sites.load(site), run, nodes=nodes)


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "runs" / "mine")


def test_planning_touches_nothing_on_disk(run, tmp_path):
    plans.show(make(run))
    assert list(tmp_path.iterdir()) == []


def test_plan_reads_back_equal(run):
    plan = make(run)
    run.path.mkdir(parents=True)
    run.plan.write_text(plan.to_json())
    assert plans.load(run) == plan


def test_a_run_continues_on_other_nodes_and_another_split_and_with_nothing_else_changed(run):
    plan = make(run, backend="megatron", parallel={"expert": 2})
    run.path.mkdir(parents=True)
    run.plan.write_text(plan.to_json())
    moved, _, _ = control.resume(run, 0, None, nodes=4, split=["parallel.tensor=2"])
    assert (moved.nodes, moved.recipe.parallel.tensor) == (4, 2)
    assert moved.recipe.model_copy(update={"parallel": plan.recipe.parallel}) == plan.recipe
    sizes = {o.key: o.value for o in moved.overrides}
    assert sizes["actor_rollout_ref.actor.megatron.tensor_model_parallel_size"] == 2
    with pytest.raises(UsageFault, match="a run keeps its recipe"):
        control.resume(run, 0, None, split=["optimizer.learning_rate=1"])
    with pytest.raises(UsageFault, match="divide"):
        control.resume(run, 0, None, split=["parallel.tensor=3"])


def test_every_derived_value_has_a_reason(run):
    plan = make(run)
    for value in (*plan.environment.values(), *plan.notes.values(), *plan.overrides):
        assert value.reason.strip()


def test_nodes_on_one_machine_share_no_port_and_no_address(run):
    plan = make(run, nodes=4)
    first_ports = [plans.planned_ports(plan, 1, rank).first for rank in range(4)]
    assert len(set(first_ports)) == 4
    assert min(abs(a - b) for a in first_ports for b in first_ports if a != b) >= 512
    assert len(set(plans.planned_addresses(plan))) == 4


def test_attempts_and_runs_use_different_temporary_folders(run, tmp_path):
    plan, other = make(run), make(RunDir(tmp_path / "runs" / "other"))
    folders = {p.ray_temp(attempt, rank) for p in (plan, other) for attempt in (1, 2) for rank in (0, 1)}
    assert len(folders) == 8
    assert all(len(str(folder)) <= plans.RAY_TEMP_LIMIT for folder in folders)


def test_scratch_folder_too_long_for_sockets_is_refused(run, tmp_path):
    site = sites.parse({"kind": "local", "scratch": "/tmp/" + "x" * 60}, "site")
    plan = plans.make(recipes.Recipe.model_validate(TREE), site, run)
    with pytest.raises(UsageFault, match="107 bytes"):
        plan.ray_temp(1, 0)


@pytest.mark.parametrize("nodes", [0, -1])
def test_no_nodes_is_refused(run, nodes):
    with pytest.raises(UsageFault, match="at least 1"):
        make(run, nodes=nodes)


def test_split_that_does_not_fit_the_devices_is_refused_with_the_arithmetic(run):
    with pytest.raises(UsageFault, match=r"2.*does not divide 3"):
        make(run, nodes=3, backend="megatron", parallel={"tensor": 2})


def test_fsdp2_with_a_tensor_split_is_refused(run):
    with pytest.raises(UsageFault, match="backend: megatron"):
        make(run, parallel={"tensor": 2})


def test_more_nodes_than_the_memory_bears_names_need_and_remedy(tmp_path):
    with pytest.raises(UsageFault, match=r"64 nodes .* need about \d+ GB .* NODES=(\d+)") as caught:
        machine.check_memory(tmp_path, 64, 1, available_gb=20)
    fits = int(str(caught.value).partition("NODES=")[2].partition(",")[0])
    machine.check_memory(tmp_path, fits, 1, available_gb=20)
    with pytest.raises(UsageFault):
        machine.check_memory(tmp_path, fits + 1, 1, available_gb=20)


def test_damaged_plan_is_one_line(run):
    run.path.mkdir(parents=True)
    run.plan.write_text("{")
    with pytest.raises(Fault, match=r"plan\.json cannot be read"):
        plans.load(run)


def test_job_ids_lead_to_their_run_and_the_newest_wins(tmp_path):
    for name, time in (("old", 1.0), ("new", 2.0)):
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        run.plan.write_text("{}")
        run.journal.write_text(f'{{"time": {time}, "event": "submitted", "attempt": 1, "job": "4711"}}\n')
    assert progress.find("4711", tmp_path).name == "new"
    assert progress.find("old", tmp_path).name == "old"
    with pytest.raises(Fault, match="runs there: new, old"):
        progress.find("4712", tmp_path)
