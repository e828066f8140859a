"""What follows an ended attempt, as a table; and that nothing can go round for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlasrl import outcome
from atlasrl.outcome import Facts
from atlasrl.site import Life

LIFE = Life()


@pytest.mark.parametrize(
    ("facts", "kind", "action"),
    [
        (Facts(exit=0), "done", "done"),
        (Facts(exit=85, asked="person"), "stopped", "stop"),
        (Facts(exit=-9, asked="person"), "stopped", "stop"),
        (Facts(exit=86), "data exhausted", "stop"),
        (Facts(exit=1, message="ValueError: Generated too many. Please check your data"), "data exhausted", "stop"),
        (Facts(exit=85, asked="time limit", fruitless=0), "time limit", "requeue"),
        (Facts(exit=85, asked="warning", fruitless=0), "preemption", "requeue"),
        (Facts(exit=85, asked="signal"), "cancelled", "leave"),
        (Facts(exit=1, lost=("node07",)), "node failure", "requeue"),
        (Facts(exit=1, stage_exit=70, lost=("node07",)), "node failure", "requeue"),
        (Facts(exit=85, asked="warning", lost=("node07",)), "node failure", "requeue"),
        (Facts(exit=1, stage_exit=-9), "crash", "restart"),
        (Facts(exit=1, stage_exit=70), "crash", "restart"),
        (Facts(exit=-9), "crash", "restart"),
        (Facts(exit=1), "crash", "restart"),
        (Facts(exit=1, stage_exit=70, seconds_left=100, seconds_needed=600), "crash", "requeue"),
        (Facts(exit=1, stage_exit=70, seconds_left=1000, seconds_needed=600), "crash", "restart"),
        (Facts(exit=1, stage_exit=1, message="no room for the next checkpoint"), "wrong", "stop"),
        (Facts(exit=1, stage_exit=70, fruitless=3), "no progress", "stop"),
        (Facts(exit=1, lost=("node07",), fruitless=3), "no progress", "stop"),
        (Facts(exit=85, asked="warning", fruitless=3), "no progress", "stop"),
        (Facts(exit=85, asked="time limit", fruitless=4), "no progress", "stop"),
        (Facts(exit=0, fruitless=9), "done", "done"),
    ],
)
def test_each_end_has_its_consequence(facts, kind, action):
    found = outcome.classify(facts, LIFE)
    assert (found.kind, found.action) == (kind, action)


def test_the_reason_names_the_nodes_and_the_last_words():
    found = outcome.classify(Facts(exit=1, lost=("node07", "node19"), message="stage train failed"), LIFE)
    assert "node07, node19" in found.reason and "stage train failed" in found.reason


def test_giving_up_says_how_often_and_why():
    found = outcome.classify(Facts(exit=1, stage_exit=70, fruitless=3, message="NaN in loss"), LIFE)
    assert "3 attempts" in found.reason and "NaN in loss" in found.reason


def test_a_site_without_restart_in_place_requeues():
    assert outcome.classify(Facts(exit=-9), Life(restart_in_place=False)).action == "requeue"


@given(
    st.builds(
        Facts,
        exit=st.sampled_from([-15, -9, 1, 70, 85, 143]),
        asked=st.sampled_from([None, "time limit", "warning"]),
        lost=st.sampled_from([(), ("node01",)]),
        stage_exit=st.sampled_from([None, -9, 1, 70]),
        seconds_left=st.one_of(st.none(), st.floats(0, 1e6)),
    )
)
def test_whatever_ends_attempts_without_checkpoints_they_come_to_an_end(facts):
    """The trap of submitit: an early signal never counts, so the job requeues for ever."""
    events, turns = [{"event": "submitted"}], 0
    while True:
        turns += 1
        events += [{"event": "allocated", "attempt": turns}, {"event": "attempt_end", "attempt": turns}]
        now = Facts(**{**facts.__dict__, "fruitless": outcome.fruitless_attempts(events)})
        if outcome.classify(now, LIFE).action == "stop":
            break
        assert turns < LIFE.fruitless_attempts
    assert turns <= LIFE.fruitless_attempts


@pytest.mark.parametrize(
    ("story", "fruitless"),
    [
        ("", 0),
        ("S", 0),
        ("S A", 1),
        ("S A E", 1),
        ("S A 10 E", 0),
        ("S A E A E A", 3),
        ("S A 10 E A E A E", 2),
        ("S A 10 E A 10 E", 1),
        ("S A 10 E A 20 E A", 1),
        ("S A E A E S A", 1),
        ("S A E A E R A", 3),
        ("S A A A", 3),
    ],
)
def test_fruitless_attempts_are_counted_from_the_journal(story, fruitless):
    events, attempt = [], 0
    for word in story.split():
        if word == "A":  # a job without a supervisor writes only the second line
            attempt += 1
            events += [{"event": "allocated", "attempt": attempt}, {"event": "attempt_start", "attempt": attempt}]
        elif word.isdigit():
            events.append({"event": "checkpoint", "step": int(word)})
        else:
            names = {"S": "submitted", "E": "attempt_end", "R": "submitted"}
            events.append({"event": names[word], "by": "the job itself" if word == "R" else "person"})
    assert outcome.fruitless_attempts(events) == fruitless


def test_the_lead_time_grows_with_what_was_measured():
    steps = [{"timing_s/step": 600.0}, {"timing_s/step": 700.0}, {}]
    seconds, reason = outcome.seconds_to_save(steps, [400.0, 500.0], LIFE)
    assert seconds == 1.5 * (700 + 500) and "700" in reason and "500" in reason
    assert outcome.seconds_to_save([], [], LIFE)[0] == 300
    assert outcome.seconds_to_save(steps, [500.0], Life(save_minutes=2))[0] == 120
