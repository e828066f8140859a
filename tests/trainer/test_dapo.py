"""Dynamic sampling: what is drawn, kept, dropped and filled, and that it always ends."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlasrl.errors import Fault
from atlasrl.trainer.dapo import Collector, Exhausted, Groups, GroupSource, Sampling, StoredRollouts, Trend, mixed
from atlasrl.trainer.prompts import PromptSource

ROWS = [{"raw_prompt": f"question {i}", "reward_model": {"ground_truth": i}} for i in range(10)]


def source(rows=ROWS, seed=1, shuffle=True, digest="d"):
    return PromptSource(rows, digest=digest, seed=seed, shuffle=shuffle)


def ids(prompts):
    return [p.id for p in prompts]


# -- prompts ----------------------------------------------------------------------------------------


def test_every_prompt_is_seen_once_per_epoch_and_epochs_differ():
    prompts = source()
    first, second = ids(prompts.take(10)), ids(prompts.take(10))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 10
    assert first != second


@given(before=st.integers(0, 35), after=st.integers(0, 35), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_resume_anywhere_continues_with_the_same_prompts(before, after, seed):
    """Also exactly at an epoch's end, where verl's dataloader ends the run."""
    whole = ids(source(seed=seed).take(before + after))
    interrupted = source(seed=seed)
    interrupted.take(before)
    resumed = source(seed=seed)
    resumed.load_state_dict(interrupted.state_dict())
    assert ids(resumed.take(after)) == whole[before:]


def test_without_shuffling_rows_come_in_file_order():
    assert [p.row["reward_model"]["ground_truth"] for p in source(shuffle=False).take(12)] == [*range(10), 0, 1]


def test_the_state_of_other_data_is_refused():
    state = source().state_dict()
    with pytest.raises(Fault, match="was trained on data d"):
        source(digest="other").load_state_dict(state)
    with pytest.raises(Fault, match=r"10 prompts.*9 prompts"):
        source(rows=ROWS[:9]).load_state_dict(state)


def test_an_id_changes_with_the_answer_as_well_as_with_the_question():
    changed = [{**row, "reward_model": {"ground_truth": -1}} for row in ROWS]
    assert set(ids(source().take(10))).isdisjoint(ids(source(rows=changed).take(10)))


def test_no_data_is_a_fault():
    with pytest.raises(Fault, match="no prompt that fits"):
        source(rows=[])


# -- collecting -------------------------------------------------------------------------------------


def collector(is_mixed, **changes):
    """A collector over plain lists; `is_mixed(number of the group)` decides the outcomes of its two answers."""
    sizes = {"train_batch_size": 4, "gen_batch_size": 4, "samples": 2, "dynamic": True, "max_gen_batches": 3}
    sampling = Sampling(**{**sizes, "when_exhausted": "stop", **changes})
    generated = []

    def generate(prompts, step, generation):
        start = len(generated)
        generated.extend(prompts)
        return Groups(prompts, [is_mixed(start + i) for i in range(len(prompts))])

    def outcomes(groups):
        return np.array([[0.0, float(m)] for m in groups.answers])

    def join(parts):
        chosen = [(g.prompts[i], g.answers[i]) for g, indices in parts for i in indices]
        return Groups([p for p, _ in chosen], [m for _, m in chosen])

    made = Collector(sampling, source(rows=ROWS * 3), generate, outcomes, join)
    made.generated = generated
    return made


def test_one_generation_suffices_when_all_groups_are_mixed():
    made = collector(lambda i: True)
    step = made.collect(1)
    assert step.groups.prompts == made.generated
    assert step.counters["train/num_gen_batches"] == 1


def test_unmixed_groups_are_dropped_surplus_ones_too_and_all_are_counted():
    made = collector(lambda i: i % 3 != 0)  # 0 1 1 0 | 1 1 0 1
    step = made.collect(1)
    assert ids(step.groups.prompts) == ids(made.generated[i] for i in (1, 2, 4, 5))
    assert step.counters == {
        "train/num_gen_batches": 2,
        "train/groups_generated": 8,
        "train/groups_dropped": 3,
        "train/groups_surplus": 1,
        "train/groups_filled": 0,
    }


@given(pattern=st.lists(st.booleans(), min_size=24, max_size=24), when=st.sampled_from(["stop", "fill"]))
@settings(max_examples=100, deadline=None)
def test_a_step_is_full_or_refused_within_the_limit_and_groups_add_up(pattern, when):
    made = collector(lambda i: pattern[i], when_exhausted=when)
    try:
        step = made.collect(1)
    except Exhausted:
        assert sum(pattern[:12]) < 4
        assert when == "stop"
        assert len(made.generated) == 12
        return
    count = step.counters
    assert len(step.groups.prompts) == 4
    assert len(set(ids(step.groups.prompts))) == 4
    assert count["train/num_gen_batches"] <= 3
    assert step.groups.answers[: 4 - step.filled] == [True] * (4 - step.filled)
    assert step.groups.answers[4 - step.filled :] == [False] * step.filled
    assert count["train/groups_generated"] == 4 + count["train/groups_dropped"] + count["train/groups_surplus"]


def test_exhaustion_tells_the_arithmetic_and_what_would_do():
    made = collector(lambda i: i == 5)
    with pytest.raises(
        Exhausted, match=r"3 generation\(s\) of 4 prompts gave 1 mixed groups of 12, 4 are needed"
    ) as told:
        made.collect(7)
    assert "about 48 prompts" in str(told.value)
    assert "step 7" in str(told.value)
    assert told.value.exit_code == 86


def test_filling_needs_enough_groups_to_fill_with():
    """gen_batch_size may be so small that even unmixed groups do not fill the step."""
    made = collector(lambda i: False, gen_batch_size=1, max_gen_batches=3, when_exhausted="fill")
    with pytest.raises(Exhausted):
        made.collect(1)


def test_without_dynamic_sampling_everything_is_kept():
    made = collector(lambda i: False, dynamic=False)
    step = made.collect(1)
    assert step.groups.prompts == made.generated
    assert step.filled == 0


def test_a_group_of_one_answer_counts_as_mixed():
    assert mixed(np.zeros((3, 1))).all()
    assert mixed(np.array([[1.0, 1.0], [1.0, 0.0]])).tolist() == [False, True]


# -- between fit and the collector ------------------------------------------------------------------


def test_the_source_ends_with_the_last_step_and_counts_as_one_epoch():
    now = iter([1, 2, 3, 4])
    made = GroupSource(3, lambda: next(now), collector(lambda i: True), lambda found: {"n": len(found.groups.prompts)})
    assert list(made) == [{"n": 4}] * 3
    assert len(made) == 3


class Batch(list):
    meta_info: ClassVar[dict] = {}


def test_stored_answers_are_given_once_and_only_for_as_many_rows():
    rollouts = StoredRollouts(manager=None)
    rollouts.stored = ["a", "b"]
    with pytest.raises(RuntimeError, match="asks for 3 answers, 2 are stored"):
        rollouts.generate_sequences(Batch("xyz"))
    rollouts.stored = ["a", "b"]
    assert rollouts.generate_sequences(Batch("xy")) == ["a", "b"]
    with pytest.raises(RuntimeError, match="none are stored"):
        rollouts.generate_sequences(Batch("xy"))


def test_the_trend_warns_once_per_doubling():
    trend = Trend(limit=16)
    said = [step for step in range(1, 40) if trend.observe(step, 1 if step < 10 else 12)]
    assert len(said) == 2
    assert trend.observe(40, 1) is None
