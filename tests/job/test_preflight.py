"""Preflight stops what cannot go well, with everything that is missing at once, and lets through what was accepted."""

from __future__ import annotations

import json
import shutil

import pytest

from atlasrl import doctor, lint, preflight
from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl import site as sites
from atlasrl.doctor import Finding
from atlasrl.rundir import RunDir

LARGE = "deepseek-v3-671b-dapo"
ARTICLE = ["stack=a2-article"]


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Exit code and lines of a preflight; `node` is what the doctor says of the machine."""

    def say(*changes, rank=0, name=LARGE, node=(), nodes=None):
        monkeypatch.setattr(
            doctor, "findings", lambda device, without, **given: [] if "driver" in without else list(node)
        )
        run = RunDir(tmp_path / "run")
        run.path.mkdir(exist_ok=True)
        site = sites.parse({"kind": "slurm", "nic": "ib0"}, "test")
        run.plan.write_text(plans.make(recipes.load(name, list(changes)), site, run, nodes=nodes).to_json())
        code = preflight.main(str(run.path), str(rank))
        return code, capsys.readouterr().out.splitlines()

    return say


def test_each_lint_error_is_a_line_with_rule_reason_and_remedy_and_stops_the_run(said):
    found = lint.findings(recipes.load(LARGE, ARTICLE), 32, 8)
    errors = [each for each in found if each.level == "error"]
    assert len(errors) >= 2
    code, lines = said(*ARTICLE)
    assert code == 1
    for each in errors:
        (line,) = [line for line in lines if line.startswith(f"error: {each.rule}: ")]
        assert each.reason in line and each.remedy in line
    assert any(line.startswith("warn  fresh-host-optimizer: ") for line in lines)


def test_an_accepted_rule_is_told_and_does_not_stop(said):
    rules = sorted({each.rule for each in lint.findings(recipes.load(LARGE, ARTICLE), 32, 8) if each.level == "error"})
    first, *others = rules
    _, lines = said(*ARTICLE, f"accept=[{first}]")
    assert any(line.startswith(f"warn  {first}: ") for line in lines)
    assert not any(line.startswith(f"error: {first}: ") for line in lines)
    assert all(any(line.startswith(f"error: {other}: ") for line in lines) for other in others)


def test_a_misspelt_acceptance_accepts_nothing_and_is_told(said):
    _, lines = said(*ARTICLE, "accept=[expert-group]")
    assert any(line.startswith("error: expert-groups: ") for line in lines)
    assert "warn  accept: expert-group is no rule of lint and nothing that was checked here" in lines


def test_the_last_line_tells_the_run_s_end_what_is_missing(said):
    """The journal and bin/status keep one line of a failed stage: it must be one that says something."""
    code, lines = said()
    assert code == 1
    assert lines[-1].startswith("error: ") and "findings (" in lines[-1]
    assert "model" in lines[-1] and "data" in lines[-1]


def test_every_npu_node_is_examined_and_its_errors_stop_the_run(said):
    sick = Finding("health", "error", "NPU 3 is Alarm", "exclude the node")
    code, lines = said(rank=7, node=[sick, Finding("cpu", "warn", "slow", "faster")])
    assert code == 1
    assert "error: health: NPU 3 is Alarm; exclude the node" in lines
    assert "warn  cpu: slow; faster" in lines
    assert not any("expert-groups" in line for line in lines), "the recipe is rank 0's to judge"


def test_imports_are_tried_on_a_node_that_is_else_in_order(said, monkeypatch):
    """They take a minute; torch_npu without CANN ends the interpreter."""
    asked = []

    def findings(device, without, **given):
        asked.append(sorted(doctor.checks(device).keys() - set(without)))
        return [] if given["devices_per_node"] == 8 else [Finding("devices", "error", "8 NPUs, 16 expected", "")]

    def preflight_of(devices):
        plan = plans.make(
            recipes.load(LARGE, [f"devices_per_node={devices}"]), sites.parse({"kind": "slurm"}, "t"), RunDir("/r")
        )
        monkeypatch.setattr(doctor, "findings", findings)
        return preflight.examine_node(plan)

    preflight_of(8)
    assert asked.pop() == ["imports"]
    assert len(asked) == 1 and "imports" not in asked.pop()
    preflight_of(16)
    assert len(asked) == 1 and "imports" not in asked.pop()


def test_an_accepted_finding_of_a_node_does_not_stop_the_run(said):
    sick = Finding("driver", "error", "24.1.0.3 expected, 25.2.0 found", "install it")
    assert said("accept=[driver, disk]", rank=7, node=[sick])[0] == 0
    assert said("accept=[disk]", rank=7, node=[sick])[0] == 1


def test_a_check_that_breaks_hides_no_other(said, monkeypatch):
    monkeypatch.setattr(lint, "findings", lambda *a, **k: 1 / 0)
    code, lines = said()
    assert code == 1
    assert any(line.startswith("error: lint: ZeroDivisionError") for line in lines)
    assert any(line.startswith("error: data: ") for line in lines)


def test_a_guard_without_its_baseline_is_found_before_the_cluster_starts(said, tmp_path):
    _, lines = said(f"guard.baseline={tmp_path / 'gpu'}", "guard.action=stop")
    assert any(line.startswith("error: guard: no baseline") for line in lines)


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
@pytest.mark.parametrize("changes", [[], ["steps=2"], ["seed=3", "steps=200"]])
def test_recipes_for_this_machine_break_no_rule(name, changes):
    loaded = recipes.load(name, changes)
    for nodes in {loaded.nodes, 2}:
        assert [each for each in lint.findings(loaded, nodes, 1) if each.level == "error"] == []


def test_lint_counts_what_was_accepted_apart():
    from atlasrl.lint import arithmetic, report

    loaded = recipes.load(LARGE, [*ARTICLE, "accept=[expert-groups, fresh-host-optimizer]"])
    found = lint.findings(loaded, 32, 8)
    levels = {each.rule: each.level for each in found}
    assert (levels["expert-groups"], levels["fresh-host-optimizer"]) == ("accepted", "warning")
    last = report.text("x", found, arithmetic.of_recipe(loaded, 32, 8, None, None)).splitlines()[-1]
    assert last.endswith("1 accepted")
    assert json.dumps([each.as_json() for each in found])


def test_a_copy_whose_index_lists_what_is_never_saved_is_refused_for_megatron(said, tmp_path):
    """The article's bug: `rotary_emb.inv_freq` in the index, and mbridge's save lost whole shards."""
    _, lines = said(name="tiny", nodes=2)
    assert any(line.startswith("ok    saving: mbridge will save each of") for line in lines)
    published = recipes.load("tiny").model.path
    copy = shutil.copytree(published, tmp_path / "copy")
    code, lines = said(f"model.cast_path={copy}", name="tiny", nodes=2)
    (line,) = [line for line in lines if line.startswith("error: saving: ")]
    assert code == 1 and "never saved, the index lists" in line and line.endswith(f"bin/ckpt repair {copy}")
