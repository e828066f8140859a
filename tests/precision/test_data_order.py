"""The data axis: every way in which two runs can see different prompts is named, and nothing else is."""

from __future__ import annotations

import json
import random

import pytest

from atlasrl.errors import Fault
from atlasrl.precision import data
from atlasrl.rundir import RunDir

ROWS, BATCH, STEPS = 400, 8, 40


def content(row: int, version: str = "a") -> str:
    return f"{version}{row:011x}"


def records(order, steps=STEPS, batch=BATCH, tokens="t", first=1) -> dict[int, dict]:
    """Samples of a run that draws (row, content) pairs in `order`."""
    made = {}
    for index in range(steps):
        drawn = order[index * batch : (index + 1) * batch]
        made[first + index] = {
            "step": first + index,
            "prompt_ids": [f"{row}:{text}" for row, text in drawn],
            "prompt_tokens": [f"{tokens}{text}" for _, text in drawn],
            "responses": "r",
        }
    return made


def shuffled(seed: int, version: str = "a") -> list[tuple[int, str]]:
    rows = list(range(ROWS))
    random.Random(seed).shuffle(rows)
    return [(row, content(row, version)) for row in rows]


BASE = records(shuffled(1))


def causes(ours, theirs=BASE, **options):
    return [found.cause for found in data.compare(ours, theirs, **options)]


def test_two_runs_that_saw_the_same_differ_in_nothing():
    assert causes(records(shuffled(1))) == []
    assert [str(w) for w in data.compare_windows(BASE, BASE)][1] == (
        "middle steps 16–25: the same prompts in the same order"
    )


def test_another_seed_is_another_order_unless_it_was_meant():
    assert causes(records(shuffled(2))) == ["order"]
    assert causes(records(shuffled(2)), same_seed=False) == []


def test_other_data_is_told_whatever_the_seed():
    assert causes(records(shuffled(1, "b"))) == ["content"]
    assert causes(records(shuffled(2, "b")), same_seed=False) == ["content"]


def test_a_few_steps_of_a_large_data_set_prove_no_other_data():
    few = [(row * 1000, text) for row, text in shuffled(2, "b")]
    assert causes(records(few, steps=2), records(shuffled(1), steps=2), same_seed=False) == []


@pytest.mark.parametrize("moved", [1, 5, 8, 24])
def test_a_shift_is_measured_in_prompts_and_direction(moved):
    order = shuffled(1)
    [found] = data.compare(records(order[moved:], steps=30), BASE)
    assert found.cause == "shift" and f"{moved} prompts ahead of the baseline, from the first step on" in found.what
    [found] = data.compare(BASE, records(order[moved:], steps=30))
    assert f"{moved} prompts behind the baseline" in found.what


def test_a_resume_that_loses_its_place_is_told_with_the_step():
    order = shuffled(1)
    [found] = data.compare(records(order[: 20 * BATCH] + order[23 * BATCH :], steps=37), BASE)
    assert "the first steps are the same" in found.what


def test_dynamic_sampling_that_keeps_other_groups_is_no_fault_of_the_data():
    kept = [item for item in shuffled(1) if random.Random(item[0]).random() < 0.8]
    assert causes(records(kept, steps=30)) == ["selection"]


def test_another_chat_template_shows_in_the_tokens_alone():
    [found] = data.compare(records(shuffled(1), tokens="u"), BASE)
    assert found.cause == "tokens" and f"{STEPS * BATCH} of {STEPS * BATCH} common prompts" in found.what
    assert causes(records(shuffled(2), tokens="u"), same_seed=False) == ["tokens"]


def test_records_without_token_digests_are_no_difference():
    old = {step: {k: v for k, v in line.items() if k != "prompt_tokens"} for step, line in BASE.items()}
    assert causes(old) == []


def test_duplicate_rows_are_counted():
    copies = [(copy * ROWS + row, text) for copy in range(8) for row, text in shuffled(copy)[:40]]
    found = data.compare(records(copies), records(copies))
    assert [d.cause for d in found] == ["duplicates", "duplicates"]
    assert "320 rows of the data hold" in found[0].what


def test_a_prompt_seen_again_in_the_next_epoch_is_no_duplicate():
    twice = shuffled(1)[:160] * 2
    assert causes(records(twice), records(twice)) == []


def test_runs_without_a_common_step_are_refused():
    with pytest.raises(Fault, match="one has 41–80, the other 1–40"):
        data.compare(records(shuffled(1), first=41), BASE)


def test_a_step_that_two_attempts_trained_counts_as_the_last_one_left_it(tmp_path):
    run = RunDir(tmp_path / "run")
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        run.attempt(attempt).path.mkdir(parents=True)
        lines = [json.dumps({**BASE[step], "attempt": attempt}) + "\n" for step in steps]
        run.attempt(attempt).samples.write_text("".join(lines))
    read = data.samples(run)
    assert list(read) == [1, 2, 3, 4]
    assert [read[step]["attempt"] for step in read] == [1, 1, 2, 2]
    with pytest.raises(Fault, match=r"has no samples\.jsonl"):
        data.samples(RunDir(tmp_path / "none"))
