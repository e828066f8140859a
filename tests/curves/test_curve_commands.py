"""bin/compare and bin/baseline: exit codes, the store, following a live run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import curve_assets as assets
import numpy as np
import pytest
from click.testing import CliRunner

from atlasrl.cli.baseline import main as baseline
from atlasrl.cli.compare import main as compare
from atlasrl.curves import guard, load, rules, store
from atlasrl.errors import Fault, UsageFault

RULES = rules.load()
REWARD = "critic/rewards/mean"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder with three GPU seeds, a run like them, and one that learns too slowly."""
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2, 3):
        assets.write_jsonl(assets.dapo_run(seed), tmp_path / f"gpu{seed}.jsonl")
    assets.write_jsonl(assets.dapo_run(9), tmp_path / "good.jsonl")
    assets.write_jsonl(assets.dapo_run(9, speed=0.5), tmp_path / "slow.jsonl")
    return tmp_path


def run(command, *arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments])


GPU = ("-b", "gpu1.jsonl", "-b", "gpu2.jsonl", "-b", "gpu3.jsonl")


def test_exit_code_0_aligned_1_not_aligned_2_unreadable(runs):
    assert run(compare, "good.jsonl", *GPU).exit_code == 0
    slow = run(compare, "slow.jsonl", *GPU, "--json")
    assert slow.exit_code == 1
    told = json.loads(slow.stdout)
    assert told["aligned"] is False and any(m["status"] == "not aligned" and m["first_step"] for m in told["metrics"])
    for wrong in (("nowhere", *GPU), ("good.jsonl", "-b", "nothing"), ("good.jsonl", *GPU, "--steps", "x"), ()):
        assert run(compare, *wrong).exit_code == 2
    (runs / "good.jsonl").write_text('{"broken\n')
    broken = run(compare, "good.jsonl", *GPU)
    assert broken.exit_code == 2 and broken.stderr.startswith("error: ") and broken.stderr.count("\n") == 1


@pytest.mark.browser
def test_all_reports_of_one_call(runs):
    done = run(compare, "slow.jsonl", *GPU, "--html", "r.html", "--png", "r.png", "--tensorboard", "tb", "--details")
    assert done.exit_code == 1
    assert (runs / "r.html").stat().st_size > 50_000 and (runs / "r.png").exists()
    assert len(list((runs / "tb").iterdir())) == 4


def test_a_stored_baseline_gives_the_same_verdict_as_its_runs(runs):
    assert run(baseline, "add", "gpu", "gpu1.jsonl", "gpu2.jsonl", "gpu3.jsonl").exit_code == 0
    direct, stored = (json.loads(run(compare, "slow.jsonl", *b, "--json").stdout) for b in (GPU, ("-b", "gpu")))
    assert direct["metrics"] == [{**m, "reason": m["reason"].replace("gpu/", "")} for m in stored["metrics"]]
    assert "gpu: 3 seeds, 200 steps" in run(baseline, "list").stdout
    described = json.loads(run(baseline, "show", "gpu").stdout)
    assert {"git", "host", "seeds", "recipe"} <= set(described) and described["host"]["stack"][
        "numpy"
    ] == np.__version__


def test_a_baseline_keeps_every_bit_and_its_recipe(tmp_path):
    made = assets.dapo_run(1)
    made.curves[REWARD].values[3:6] = np.nan, np.inf, 0.1 + 0.2
    made.context = {"recipe": {"seed": 1}}
    store.add("gpu", [made], tmp_path)
    (read,) = store.load_seeds("gpu", tmp_path)
    np.testing.assert_equal(assets.plain(read), assets.plain(made))
    assert read.context["recipe"] == {"seed": 1}


def test_a_baseline_that_was_changed_is_refused(tmp_path):
    folder = store.add("gpu", [assets.dapo_run(1)], tmp_path)
    file = folder / "1.csv.gz"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(Fault, match=r"1.csv.gz was changed: sha256"):
        store.load_seeds("gpu", tmp_path)
    file.unlink()
    with pytest.raises(Fault, match="is missing"):
        store.load_seeds("gpu", tmp_path)


def test_a_baseline_never_changes_and_never_leaves_its_folder(tmp_path):
    folder = store.add("gpu", [assets.dapo_run(1)], tmp_path)
    with pytest.raises(UsageFault, match="exists"):
        store.add("gpu", [assets.dapo_run(2)], tmp_path)
    with pytest.raises(UsageFault, match="folder name"):
        store.add("../gpu", [assets.dapo_run(2)], tmp_path)
    record = json.loads((folder / "baseline.json").read_text())
    record["seeds"][0]["file"] = "../../../etc/passwd"
    (folder / "baseline.json").write_text(json.dumps(record))
    with pytest.raises(Fault, match=r"gpu/passwd of baseline gpu is missing"):
        store.load_seeds("gpu", tmp_path)


def jsonl_lines(made) -> list[str]:
    rows: dict[int, dict] = {}
    for tag, curve in made.curves.items():
        for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
            rows.setdefault(step, {})[tag] = value
    return [json.dumps({"step": step, "data": rows[step]}) + "\n" for step in sorted(rows)]


def test_a_watch_calls_its_hook_once_when_a_check_starts_to_fail(tmp_path):
    """The run is fine up to step 59 and then loses its reward; the hook must fire once, soon after, with the facts."""
    made = assets.dapo_run(9)
    values = made.curves[REWARD].values - np.where(np.arange(1, 201) >= 60, 0.5, 0)
    lines = jsonl_lines(assets.changed(made, REWARD, values))
    file, told = tmp_path / "m.jsonl", tmp_path / "told"
    file.write_text("")
    hook = f'echo "$ATLASRL_STEP $ATLASRL_FAILURES" >> {told}; cat > {tmp_path}/verdict.json'
    seeds = [assets.dapo_run(seed) for seed in (1, 2, 3)]
    watch = guard.Watch(load.RunReader(str(file)), guard.Guard(RULES, seeds), hook)
    for line in lines[:90]:
        with file.open("a") as out:
            out.write(line)
        failures = watch.update()
        if json.loads(line)["step"] < 60:
            assert failures == []
    reports = told.read_text().splitlines()
    steps = [int(report.split()[0]) for report in reports if "reward" in report]
    assert 60 < steps[0] <= 75 and "reward fails" in reports[0]
    assert len(reports) == len(set(reports)) <= 4  # one per check that starts to fail, not one per step
    assert json.loads((tmp_path / "verdict.json").read_text())["aligned"] is False
    assert watch.update() is None


def test_a_hook_that_fails_is_an_error(tmp_path):
    file = assets.write_jsonl(assets.dapo_run(9, speed=0.3), tmp_path / "m.jsonl")
    watch = guard.Watch(load.RunReader(str(file)), guard.Guard(RULES, [assets.dapo_run(1)]), "exit 3")
    with pytest.raises(UsageFault, match="hook exited with 3"):
        watch.update()


def test_a_guard_judges_nothing_before_its_first_steps_and_needs_no_baseline_for_nan():
    short = assets.dapo_run(9, steps=19)
    short.curves[REWARD].values[:] = np.nan
    assert guard.Guard(RULES, []).check(short) == []
    long = assets.dapo_run(9, steps=20)
    long.curves[REWARD].values[10] = np.nan
    (failure,) = guard.Guard(RULES, []).check(long)
    assert failure.new and failure.sentence().startswith("reward fails finite since step 11")


def test_the_guard_of_a_recipe_watches_its_run_directory(tmp_path):
    from atlasrl.recipe import Guard

    baseline = store.add("gpu", [assets.dapo_run(seed) for seed in (1, 2, 3)], tmp_path / "baselines")
    slow = assets.write_jsonl(assets.dapo_run(9, speed=0.3), tmp_path / "npu" / "attempts" / "0001" / "metrics.jsonl")
    watch = guard.of_recipe(Guard(baseline=baseline, action="stop", after_steps=30), tmp_path / "npu")
    assert {failure.metric for failure in watch.update()} >= {"reward", "entropy"}
    slow.write_text("".join(slow.read_text().splitlines(keepends=True)[:29]))
    assert guard.of_recipe(Guard(baseline=baseline, after_steps=30), tmp_path / "npu").update() == []


def test_following_ends_with_the_run_and_its_verdict(runs):
    folder = runs / "runs" / "npu"
    assets.write_jsonl(assets.dapo_run(9, speed=0.5), folder / "attempts" / "0001" / "metrics.jsonl")
    (folder / "attempts" / "0001" / "outcome.json").write_text("{}")
    done = run(compare, "npu", *GPU, "--follow", "--hook", "echo $ATLASRL_RUN > hooked")
    assert done.exit_code == 1 and "step 200: " in done.stdout
    assert (runs / "hooked").read_text() == "npu\n"
    assert run(compare, "good.jsonl", *GPU, "--follow", "--until-step", "200").exit_code == 0


@pytest.mark.parametrize("verb", ["compare", "baseline"])
def test_help_imports_nothing_heavy_and_the_library_no_training_stack(verb):
    code = (
        f"import sys; from atlasrl.cli.{verb} import main\n"
        "cheap = [m for m in ('numpy', 'matplotlib', 'pydantic') if m in sys.modules]\n"
        "import atlasrl.curves.compare\n"
        "heavy = [m for m in ('torch', 'ray', 'verl', 'tensorboard', 'pandas', 'matplotlib') if m in sys.modules]\n"
        "print(cheap, heavy)"
    )
    where = {**os.environ, "PYTHONPATH": str(Path(guard.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=where)
    assert done.stdout == "[] []\n"
