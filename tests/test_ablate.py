"""Ablations: the design is what was asked for, and a killed one goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlasrl import ablate, ablation_page, control
from atlasrl import site as sites
from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import RunDir

VARY = {"optimizer.learning_rate": ["2e-4", "1e-4"], "dapo.clip_high": ["0.28", "0.2"]}


def test_one_factor_at_a_time_and_grid():
    one = [variant.values for variant in ablate.variants(VARY, "one")]
    assert one[0] == {"optimizer.learning_rate": "2e-4", "dapo.clip_high": "0.28"}
    assert [sum(values[key] != one[0][key] for key in values) for values in one] == [0, 1, 1]
    grid = [tuple(variant.values.values()) for variant in ablate.variants(VARY, "grid")]
    assert sorted(grid) == sorted({("2e-4", "0.28"), ("2e-4", "0.2"), ("1e-4", "0.28"), ("1e-4", "0.2")})
    assert grid[0] == ("2e-4", "0.28")


@given(st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=5, unique=True))
def test_every_variant_has_a_folder_name_of_its_own(values):
    from atlasrl.rundir import check_name

    names = [variant.name for variant in ablate.variants({"environment.X": values}, "one")]
    assert len(set(names)) == len(values)
    for name in names:
        check_name(name)


@pytest.mark.parametrize("text", ["lr", "lr=1", "lr=1,1", "=1,2", "lr="])
def test_a_factor_without_two_values_is_refused(text):
    with pytest.raises(UsageFault, match="is not KEY=VALUE,VALUE"):
        ablate.parse_vary([text])


def test_too_many_runs_are_refused_before_any_starts():
    with pytest.raises(UsageFault, match="more than 64"):
        ablate.variants({f"environment.{i}": ["0", "1"] for i in range(7)}, "grid")


def test_a_wrong_key_is_told_before_any_folder_is_made(tmp_path):
    with pytest.raises(UsageFault, match="learning_rate"):
        ablate.open_folder(tmp_path / "a", ablate.Ablation("tiny", {"optimizer.learnig_rate": ["1", "2"]}, "one"))
    assert not (tmp_path / "a").exists()


def test_another_ablation_of_the_same_name_is_refused(tmp_path):
    ablate.open_folder(tmp_path / "a", ablate.Ablation("tiny", VARY, "one"))
    assert len(ablate.open_folder(tmp_path / "a", ablate.Ablation("tiny", VARY, "one")).variants) == 3
    with pytest.raises(UsageFault, match="holds another ablation"):
        ablate.open_folder(tmp_path / "a", ablate.Ablation("tiny", VARY, "grid"))


class Jobs:
    """Stands in for the launcher: a started run writes the metrics of a finished one, or dies."""

    def __init__(self, monkeypatch, dies: set[str] = frozenset()):
        self.started, self.resumed, self.dies = [], [], dies
        monkeypatch.setattr(control, "start", self.start)
        monkeypatch.setattr(control, "resume", self.resume)

    def start(self, plan, checkpoint=None):
        run = plan.rundir
        attempt = run.attempt(len(run.attempts()) + 1)
        attempt.path.mkdir(parents=True)
        self.started.append(run.name)
        run.record("submitted", attempt=attempt.number, job="1", site="local", resume_from=None, by="person")
        if run.name in self.dies:
            self.dies = self.dies - {run.name}
            run.record("attempt_end", attempt=attempt.number, state="failed", message="it died")
            return attempt, "1"
        rate = plan.recipe.optimizer.learning_rate
        lines = [{"step": s, "data": {"critic/score/mean": s * rate, "actor/grad_norm": 1.0}} for s in range(1, 9)]
        attempt.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run.record("attempt_end", attempt=attempt.number, state="done", message="")
        return attempt, "1"

    def resume(self, run: RunDir, step, steps):
        from atlasrl import plan as plans

        self.resumed.append(run.name)
        return plans.load(run), None, "again"


def test_a_killed_ablation_goes_on_and_starts_nothing_twice(tmp_path, monkeypatch):
    jobs = Jobs(monkeypatch, dies={"01-learning_rate-1e-4"})
    site = sites.load("local")
    asked = ablate.Ablation("tiny", VARY, "one")
    chosen = ablate.open_folder(tmp_path / "a", asked)
    real = ablate.state

    def killed(run):
        if len(jobs.started) == 2:
            raise KeyboardInterrupt
        return real(run)

    monkeypatch.setattr(ablate, "state", killed)
    monkeypatch.setattr(ablate, "POLL_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        ablate.work(tmp_path / "a", chosen, site, 1, print)
    monkeypatch.setattr(ablate, "state", real)
    ended = ablate.work(tmp_path / "a", ablate.open_folder(tmp_path / "a", asked), site, 1, print)
    assert set(ended.values()) == {"done"}
    assert jobs.started == ["00-base", "01-learning_rate-1e-4", "01-learning_rate-1e-4", "02-clip_high-0.2"]
    assert jobs.resumed == ["01-learning_rate-1e-4"]
    page = (tmp_path / "a" / "ablation.html").read_text()
    assert "02-clip_high-0.2" in page and "learning_rate=1e-4" in page
    rows = ablation_page.rows(tmp_path / "a", chosen)
    assert "reward 0.0006" in rows[1] and "not aligned" in rows[1] and "not aligned" not in rows[2]


def test_a_variant_that_dies_again_is_left_to_a_person(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "POLL_SECONDS", 0)
    jobs = Jobs(monkeypatch)
    jobs.dies = type("All", (), {"__contains__": lambda s, n: n.startswith("01"), "__sub__": lambda s, o: s})()
    chosen = ablate.open_folder(tmp_path / "a", ablate.Ablation("tiny", VARY, "one"))
    ended = ablate.work(tmp_path / "a", chosen, sites.load("local"), 1, print)
    assert ended == {"00-base": "done", "01-learning_rate-1e-4": "failed", "02-clip_high-0.2": "done"}
    assert jobs.started.count("01-learning_rate-1e-4") == 1


def test_two_at_once_are_refused(tmp_path):
    from filelock import FileLock

    chosen = ablate.open_folder(tmp_path / "a", ablate.Ablation("tiny", VARY, "one"))
    with FileLock(tmp_path / "a" / "ablation.lock"), pytest.raises(Fault, match="another bin/ablate"):
        ablate.work(tmp_path / "a", chosen, sites.load("local"), 1, print)


def test_a_run_that_nobody_made_waits(tmp_path):
    run = RunDir(Path(tmp_path) / "r")
    assert ablate.state(run) == "waiting"
