"""Real runs of the tiny recipe: seeds are aligned, planted faults are not.

The scalars were recorded by real_runs/record.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from atlasrl.cli.compare import main as compare

RECORDED = Path(__file__).parent / "real_runs"
SEEDS = ("seed1", "seed2", "seed3", "seed4")
FAULTS = {
    "learning_rate_x3": "learning_rate",
    "shuffled_answers": "reward",
    "frozen_sync": "rollout_probability_difference",
    "wrong_scale": "rollout_probability_difference",
}


def compared(candidate: str, baselines: tuple[str, ...]) -> tuple[int, dict]:
    arguments = [str(RECORDED / f"{candidate}.csv.gz"), "--json"]
    for name in baselines:
        arguments += ["-b", str(RECORDED / f"{name}.csv.gz")]
    done = CliRunner().invoke(compare, arguments)
    return done.exit_code, json.loads(done.stdout)


@pytest.mark.parametrize("candidate", SEEDS)
def test_each_seed_is_aligned_with_the_band_of_the_others(candidate):
    code, told = compared(candidate, tuple(seed for seed in SEEDS if seed != candidate))
    failed = [(m["metric"], f) for m in told["metrics"] for f in m["findings"] if f["passed"] is False]
    assert (code, told["aligned"]) == (0, True), failed
    assert sum(m["status"] == "aligned" for m in told["metrics"]) >= 6


@pytest.mark.parametrize(("fault", "metric"), FAULTS.items())
@pytest.mark.parametrize("baselines", [SEEDS[:3], SEEDS[:1]], ids=["three seeds", "one seed"])
def test_a_planted_fault_is_not_aligned_and_its_metric_and_first_step_are_named(fault, metric, baselines):
    code, told = compared(fault, baselines)
    found = {m["metric"]: m for m in told["metrics"]}[metric]
    assert code == 1 and found["status"] == "not aligned"
    assert 1 <= found["first_step"] <= 30


def test_a_threefold_learning_rate_shows_in_what_the_run_does_not_only_in_its_setting():
    _, told = compared("learning_rate_x3", SEEDS[:3])
    assert {m["metric"] for m in told["metrics"] if m["status"] == "not aligned"} - {"learning_rate"}
