"""Verdicts: planted differences are found, named and dated; noise alone is not a difference."""

from __future__ import annotations

import json

import curve_assets as assets
import numpy as np
import pytest

from atlasrl.curves import rules
from atlasrl.curves.align import Alignment
from atlasrl.curves.curve import Attempt, Curve, Run
from atlasrl.curves.judge import judge
from atlasrl.errors import UsageFault

RULES = rules.load()
SEEDS = [assets.dapo_run(seed) for seed in (1, 2, 3)]
REWARD, LENGTH = "critic/rewards/mean", "response_length/mean"


def metric(verdict, name):
    return next(m for m in verdict.metrics if m.metric == name)


def finding(verdict, name, check):
    return next(f for f in metric(verdict, name).findings if f.check == check)


def single(tag: str, values, name="run") -> Run:
    values = np.asarray(values, float)
    return Run(name, {tag: Curve(np.arange(1, len(values) + 1), values, np.full(len(values), np.nan))})


def test_another_seed_is_aligned_with_a_band_of_seeds():
    verdict = judge([assets.dapo_run(9)], SEEDS, RULES)
    assert verdict.aligned
    assert {m.metric for m in verdict.metrics if m.status == "aligned"} >= {"reward", "response_length", "entropy"}


def test_seeds_do_not_raise_false_alarms():
    """40 candidates against 3 seeds, 40 against one: not one alarm, although no value is alike."""
    alarms = [
        k
        for k in range(40)
        for baseline in ([assets.dapo_run(1000 + 3 * k + i) for i in range(3)], [assets.dapo_run(1000 + 3 * k)])
        if not judge([assets.dapo_run(100 + k)], baseline, RULES).aligned
    ]
    assert alarms == []


@pytest.mark.parametrize("baselines", [SEEDS, SEEDS[:1]], ids=["three seeds", "one seed"])
@pytest.mark.parametrize("start", [40, 120])
def test_a_reward_that_leaves_the_baseline_is_found_and_dated(baselines, start):
    run = assets.dapo_run(9)
    step = np.arange(1, 201)
    values = run.curves[REWARD].values - np.where(step >= start, 0.5, 0.0)
    verdict = judge([assets.changed(run, REWARD, values)], baselines, RULES)
    assert not verdict.aligned
    assert {m.metric for m in verdict.metrics if m.status == "not aligned"} == {"reward"}
    assert abs(metric(verdict, "reward").first_step - start) <= RULES.window


def test_a_run_that_learns_at_half_speed_is_not_aligned_and_its_slope_is_named():
    baseline = single(REWARD, np.linspace(-0.9, 0.6, 200) + np.random.default_rng(0).normal(0, 0.05, 200))
    slow = single(REWARD, np.linspace(-0.9, -0.15, 200) + np.random.default_rng(1).normal(0, 0.05, 200))
    verdict = judge([slow], [baseline], RULES)
    slope = finding(verdict, "reward", "slope_ratio")
    assert slope.passed is False and slope.value == pytest.approx(0.5, abs=0.08)


def test_a_flat_baseline_has_no_slope_to_compare_with():
    flat = [single(REWARD, np.random.default_rng(i).normal(0, 0.05, 200)) for i in range(2)]
    assert finding(judge(flat[:1], flat[1:], RULES), "reward", "slope_ratio").passed is None


def test_nan_and_infinity_fail_although_no_comparison_notices_them():
    """`nan > limit` is false, so a naive reader says PASS."""
    run = assets.dapo_run(9)
    values = run.curves[REWARD].values.copy()
    values[[49, 60]] = np.nan, np.inf
    verdict = judge([assets.changed(run, REWARD, values)], SEEDS, RULES)
    found = finding(verdict, "reward", "finite")
    assert not verdict.aligned and found.first_step == 50 and found.value == 2
    assert metric(verdict, "reward").used == 198 and metric(verdict, "reward").skipped == 2
    json.dumps(verdict.as_dict(), allow_nan=False)


def test_reward_is_judged_by_absolute_error_because_it_may_be_zero():
    """Limits of three sources (ROLL#99, verl#332, Ascend's 1 %): 0.04 on the reward is a pass, whatever the mean is."""
    step = np.linspace(0, 6, 100)
    baseline = single(REWARD, np.sin(step) * 1e-3)
    good, bad = (single(REWARD, np.sin(step) * 1e-3 + shift) for shift in (0.039, 0.041))
    assert finding(judge([good], [baseline], RULES), "reward", "mean_absolute_error").passed
    found = finding(judge([bad], [baseline], RULES), "reward", "mean_absolute_error")
    assert found.passed is False and found.value == pytest.approx(0.041) and found.formula == "mean |c - b|"


def test_the_loss_error_is_relative_and_its_noise_is_no_excuse_when_both_runs_share_it():
    """Same data on both sides: curves are noisy, but 0.9 % passes and 1.1 % fails."""
    shared = 2 + np.random.default_rng(0).normal(0, 0.5, 100)
    for factor, passes in ((1.009, True), (1.011, False)):
        verdict = judge([single("actor/pg_loss", shared * factor)], [single("actor/pg_loss", shared)], RULES)
        found = finding(verdict, "loss", "mean_relative_error")
        assert found.passed is passes and found.value == pytest.approx(factor - 1, abs=1e-9)


def test_responses_that_all_run_into_the_limit_are_called_garbled():
    run = assets.dapo_run(9)
    step = np.arange(1, 201)
    pinned = assets.changed(run, LENGTH, np.where(step >= 100, 1023.0, run.curves[LENGTH].values))
    found = finding(judge([pinned], SEEDS, RULES), "response_length", "pinned_at_maximum")
    assert found.passed is False and "garbled rollout?" in found.text and 100 <= found.first_step <= 103
    both = judge([pinned], [pinned], RULES)
    assert finding(both, "response_length", "pinned_at_maximum").passed


def test_a_jump_at_a_resume_is_found_and_one_that_continues_is_not():
    run = assets.dapo_run(9)
    step = np.arange(1, 201)
    run.attempts = [Attempt("1", 1, 100, 0), Attempt("2", 101, 200, 0)]
    assert finding(judge([run], SEEDS, RULES), "reward", "resume_jump").passed
    values = run.curves[REWARD].values - np.where(step > 100, 0.4, 0)
    found = finding(judge([assets.changed(run, REWARD, values)], SEEDS, RULES), "reward", "resume_jump")
    assert found.passed is False and found.first_step == 101


def test_a_rollout_that_disagrees_with_the_actor_fails_without_any_baseline():
    tag = "training/rollout_probs_diff_mean"
    verdict = judge([single(tag, np.full(50, 0.05))], [], RULES)
    found = finding(verdict, "rollout_probability_difference", "mean_value")
    assert found.passed is False and found.first_step == 1
    assert judge([single(tag, np.full(50, 0.004))], [], RULES).aligned


def test_a_metric_that_one_side_lacks_is_named_and_nothing_in_common_is_an_error():
    verdict = judge([assets.dapo_run(9)], [single(REWARD, SEEDS[0].curves[REWARD].values, "gpu")], RULES)
    assert metric(verdict, "entropy").status == "not judged" and "gpu" in metric(verdict, "entropy").reason
    with pytest.raises(UsageFault, match="nothing to compare"):
        judge([single("a", np.ones(9))], [single("b", np.ones(9))], RULES)


def test_a_run_too_short_to_judge_is_not_aligned():
    verdict = judge([assets.dapo_run(9, steps=4)], SEEDS, RULES)
    assert not verdict.aligned and verdict.judged == 0 and "only 4 common points" in metric(verdict, "reward").reason


def test_rounding_around_a_curve_that_is_always_zero_is_no_difference():
    seeds = [single("actor/ppo_kl", np.zeros(50)) for _ in range(2)]
    assert judge([single("actor/ppo_kl", np.full(50, 1e-9))], seeds, RULES).aligned
    assert not judge([single("actor/ppo_kl", np.full(50, 1e-3))], seeds, RULES).aligned


def test_steps_that_do_not_meet_are_counted_not_dropped_in_silence():
    a, b = single(REWARD, np.zeros(100)), single(REWARD, np.zeros(80))
    found = metric(judge([a], [b], RULES, Alignment(first=11)), "reward")
    assert (found.used, found.skipped) == (70, 20 + 10)  # candidate 81-100, baseline 1-10


def test_a_candidate_with_twice_the_batch_meets_every_second_step_of_the_baseline():
    step = np.arange(1, 201)
    baseline, candidate = single(REWARD, np.tanh(step / 80)), single(REWARD, np.tanh(2 * step[:100] / 80))
    assert not judge([candidate], [baseline], RULES).aligned
    verdict = judge([candidate], [baseline], RULES, Alignment(stride=2))
    assert verdict.aligned and finding(verdict, "reward", "mean_absolute_error").value == 0
    assert (metric(verdict, "reward").used, metric(verdict, "reward").skipped) == (100, 100)


@pytest.mark.parametrize("axis", ["samples", "tokens", "wall"])
def test_runs_with_different_batches_align_on_samples_tokens_and_hours(axis):
    def run(per_step, steps):
        step = np.arange(1, steps + 1)
        curves = {
            REWARD: np.tanh(step * per_step / 8000),
            "perf/total_num_tokens": np.full(steps, 10.0 * per_step),
            "perf/time_per_step": np.full(steps, per_step / 2),
        }
        recipe = {"dapo": {"train_batch_size": per_step // 10}, "rollout": {"samples": 10}}
        nothing = np.full(steps, np.nan)
        return Run("r", {t: Curve(step, v, nothing) for t, v in curves.items()}, context={"recipe": recipe})

    verdict = judge([run(200, 100)], [run(100, 200)], RULES, Alignment(axis=axis))
    assert verdict.aligned
    assert finding(verdict, "reward", "mean_absolute_error").value == pytest.approx(0, abs=1e-12)
    with pytest.raises(UsageFault, match=f"--x {axis} needs"):
        judge([single(REWARD, np.ones(20))], [run(100, 200)], RULES, Alignment(axis=axis))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metrics:\n  reward:\n  - check: mean_absolut_error\n    at_most: 1", "did you mean mean_absolute_error"),
        ("metrics:\n  reward:\n  - check: mean_value", "needs either `at_most: NUMBER` or `between"),
        ("metrics:\n  reward:\n  - {check: mean_value, at_most: .nan}", "must be a number"),
        ("windows: 5\nmetrics: {}", "unknown key windows; did you mean window"),
        ("window: 0\nmetrics: {}", "must be a whole number of points above 0"),
        ("metrics: [", "is not YAML"),
        ("window: 3", "has no `metrics:`"),
    ],
)
def test_rules_with_a_mistake_are_refused(tmp_path, text, message):
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(UsageFault, match=message):
        rules.load(file)


def test_every_default_limit_names_its_source():
    assert all(rule.source for checks in RULES.metrics.values() for rule in checks)
