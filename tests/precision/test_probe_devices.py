"""bin/probe on a real Ray: three logical devices of one machine, one of them broken; the rollout engine alone."""

from __future__ import annotations

import pytest
from trainer_assets import make_assets, recipe_tree

pytestmark = pytest.mark.nightly


def test_the_odd_device_is_found_and_blocks_arrive(three_devices):
    import planted_flip

    from atlasrl.precision import fleet
    from atlasrl.precision.stress import judge

    reports = fleet.stress(size=64, rounds=2, task=planted_flip.work)
    verdict = judge(reports, slow=1e9)
    assert len(reports) == 3 and not any(report.problem for report in reports), reports
    assert all(report.link is None and report.link_seconds > 0 for report in reports), reports
    [[sentence]] = verdict.odd.values()
    assert "computes" in sentence
    assert [report.device for report in reports if report.name in sentence] == ["1"]


def test_the_rollout_engine_alone_answers_with_log_probabilities(three_devices, tmp_path):
    from atlasrl import recipe as recipes
    from atlasrl.precision import infer

    assets = make_assets(tmp_path)
    recipe = recipes.parse(recipe_tree(assets), "test")
    prompts = [*infer.prompts_of(assets["train.parquet"], 3), "12"]
    session = infer.ask(recipe, assets["model"], prompts, replicas=2)
    assert [sample.prompt for sample in session.samples] == ["000=", "001=", "002=", "12="]
    assert all(len(s.tokens) == len(s.log_probs) <= 6 and max(s.log_probs) < 0 for s in session.samples)
    assert session.tokens_per_second > 0 and "on 2 engine(s)" in list(infer.lines(session))[-1]
    again = infer.ask(recipe, assets["model"], prompts, replicas=1)
    assert [s.tokens for s in again.samples] == [s.tokens for s in session.samples], "seeds belong to prompts"
