"""Resumed runs: what several attempts wrote becomes the one curve that was really trained (PAINS of many readers:
tensorboard#3732, #1272, tensorboardX#185, #187, #679; several files per run: tensorflow#2399, tensorboard#4055)."""

from __future__ import annotations

import curve_assets as assets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlasrl.curves.load import RunReader, load
from atlasrl.errors import Fault

UNINTERRUPTED = assets.points(1, 60)


def expected(points):
    curves: dict[str, list] = {}
    for tag, step, value in points:
        curves.setdefault(tag, []).append((step, value))
    return {tag: curves[tag] for tag in sorted(curves)}


def test_a_run_killed_and_resumed_twice_with_clocks_set_back_equals_the_uninterrupted_run(tmp_path):
    """Attempt 1 dies after 27 with checkpoint 20, attempt 2 after 48 with checkpoint 40; each clock is an hour back."""
    lost = assets.points(21, 27, course=1), assets.points(41, 48, course=2)
    assets.write_events(tmp_path, "1700007200.a.1.0", assets.points(1, 20) + lost[0], clock=1700007200)
    assets.write_events(tmp_path, "1700003600.b.9.0", assets.points(21, 40) + lost[1], clock=1700003600)
    assets.write_events(tmp_path, "1700000000.a.5.0", assets.points(41, 60), clock=1700000000)

    run = load(str(tmp_path))

    assert assets.plain(run) == expected(UNINTERRUPTED)
    assert run.reading.replaced == len(lost[0]) + len(lost[1])
    assert [attempt.first_step for attempt in run.attempts] == [1, 21, 41]
    assert any("clock went back" in note for note in run.reading.notes)


def test_a_later_attempt_wins_from_its_first_step_even_where_it_has_not_come_yet(tmp_path):
    """Step 28-30 of the dead attempt belong to a timeline that was given up, although nothing was written over them."""
    assets.write_events(tmp_path, "1.a.1.0", assets.points(1, 30), clock=1000)
    assets.write_events(tmp_path, "2.a.1.0", assets.points(21, 27, course=1), clock=2000)
    run = load(str(tmp_path))
    assert run.last_step() == 27
    assert assets.plain(run) == expected(assets.points(1, 20) + assets.points(21, 27, course=1))
    assert run.reading.replaced == 10 * len(assets.TAGS)


def test_files_are_ordered_by_what_was_written_not_by_their_names(tmp_path):
    assets.write_events(tmp_path, "9.zzz", assets.points(1, 30), clock=1000)
    assets.write_events(tmp_path, "1.aaa", assets.points(21, 40, course=1), clock=2000)
    assert assets.plain(load(str(tmp_path))) == expected(assets.points(1, 20) + assets.points(21, 40, course=1))


def test_one_file_that_was_appended_to_after_a_restart_is_two_attempts(tmp_path):
    written = assets.points(1, 30) + assets.points(21, 25, course=1)
    assets.write_events(tmp_path, "1.a", written, clock=1000)
    run = load(str(tmp_path))
    assert assets.plain(run) == expected(assets.points(1, 20) + assets.points(21, 25, course=1))
    assert len(run.attempts) == 2


def test_two_restarts_in_one_file_whose_clock_goes_back_keep_the_order_of_the_file(tmp_path):
    written = [assets.points(1, 30), assets.points(21, 40, course=1), assets.points(21, 35, course=2)]
    data = b"".join(assets.event_bytes(part, clock) for part, clock in zip(written, (9000, 3000, 2000), strict=True))
    (tmp_path / "events.out.tfevents.1.a").write_bytes(data)
    lines = [f"step:{step} - {tag}:{value}\n" for part in written for tag, step, value in part]
    (tmp_path / "console.log").write_text("".join(lines))
    trained = expected(assets.points(1, 20) + assets.points(21, 35, course=2))
    assert assets.plain(load(str(tmp_path / "events.out.tfevents.1.a"))) == trained
    assert assets.plain(load(str(tmp_path / "console.log"))) == trained


def test_a_purge_step_is_obeyed_although_the_first_points_come_later(tmp_path):
    """purge_step=21, then nothing is logged before 24: steps 21-23 of the dead attempt are void."""
    assets.write_events(tmp_path, "1.a", assets.points(1, 30), clock=1000)
    assets.write_events(tmp_path, "2.a", assets.points(24, 26, course=1), clock=2000, purge=21)
    assert assets.plain(load(str(tmp_path))) == expected(assets.points(1, 20) + assets.points(24, 26, course=1))


def test_a_validation_before_the_resumed_training_does_not_erase_the_step_it_validates(tmp_path):
    """verl validates at step 20 before it trains 21: the training metrics of step 20 must stay."""
    first = [*assets.points(1, 30), ("val-core/acc", 20, 0.5), ("val-core/acc", 30, 0.9)]
    second = [("val-core/acc", 20, 0.25), *assets.points(21, 25, course=1)]
    assets.write_events(tmp_path, "1.a", first, clock=1000)
    assets.write_events(tmp_path, "2.a", second, clock=2000)
    run = load(str(tmp_path))
    assert run.curves["critic/rewards/mean"].steps.tolist() == list(range(1, 26))
    assert assets.plain(run)["val-core/acc"] == [(20, 0.25)]


def test_several_files_and_hosts_that_write_different_tags_are_one_run_and_erase_nothing(tmp_path):
    assets.write_events(tmp_path, "1.trainer", assets.points(1, 20, tags=assets.TAGS[:2]), clock=1000)
    assets.write_events(tmp_path, "2.trainer", assets.points(21, 40, tags=assets.TAGS[:2]), clock=1500)
    assets.write_events(tmp_path, "1.evaluator", assets.points(5, 30, tags=assets.TAGS[2:]), clock=1200)
    run = load(str(tmp_path))
    assert run.reading.replaced == 0
    assert {tag: len(curve) for tag, curve in run.curves.items()} == dict(zip(assets.TAGS, (40, 40, 26), strict=True))


def test_values_logged_twice_for_one_step_count_once_and_are_reported(tmp_path):
    assets.write_events(tmp_path, "1.a", [("a", 1, 1.0), ("a", 1, 2.0), ("a", 2, 3.0)], clock=1000)
    run = load(str(tmp_path))
    assert assets.plain(run) == {"a": [(1, 2.0), (2, 3.0)]}
    assert run.reading.repeated == 1


def test_values_out_of_order_without_a_repeated_step_are_no_restart(tmp_path):
    assets.write_events(tmp_path, "1.a", [("a", 1, 1.0), ("a", 3, 3.0), ("a", 2, 2.0)], clock=1000)
    run = load(str(tmp_path))
    assert assets.plain(run) == {"a": [(1, 1.0), (2, 2.0), (3, 3.0)]}
    assert run.reading.replaced == 0


@pytest.fixture
def two_that_both_resumed_at_21(tmp_path):
    """The clock is proven wrong (attempt 1 is the youngest), so it cannot tell which of the two resumes came last."""
    assets.write_events(tmp_path, "c.first", assets.points(1, 30), clock=9000)
    assets.write_events(tmp_path, "b.second", assets.points(21, 40, course=1), clock=3000)
    assets.write_events(tmp_path, "a.third", assets.points(21, 35, course=2), clock=2000)
    return tmp_path


def test_an_order_that_nothing_proves_is_refused(two_that_both_resumed_at_21):
    with pytest.raises(Fault, match=r"cannot tell whether .*third.* or .*second.* was written first"):
        load(str(two_that_both_resumed_at_21))


def test_files_named_in_order_settle_it(two_that_both_resumed_at_21):
    folder = two_that_both_resumed_at_21
    files = ",".join(f"{folder}/events.out.tfevents.{name}" for name in ("c.first", "b.second", "a.third"))
    run = load(f"npu={files}")
    assert run.name == "npu"
    assert assets.plain(run) == expected(assets.points(1, 20) + assets.points(21, 35, course=2))


def test_a_run_directory_knows_the_order_from_its_attempts_by_the_values_in_both_logs(tmp_path):
    """The same attempts with their metrics.jsonl: event files carry no number, but equal values prove whose it is."""
    run = tmp_path / "npu-1"
    attempts = ((1, 30, 0, 9000), (21, 40, 1, 3000), (21, 35, 2, 2000))
    for number, (first, last, course, clock) in enumerate(attempts, 1):
        written = assets.points(first, last, course)
        assets.write_events(run / "tensorboard", f"{10 - number}.host", written[:-3], clock)  # the last flush is lost
        rows: dict[int, dict] = {}
        for tag, step, value in written:
            rows.setdefault(step, {})[tag] = value
        folder = run / "attempts" / f"{number:04d}"
        folder.mkdir(parents=True)
        text = "".join(f'{{"step": {s}, "data": {str(d).replace(chr(39), chr(34))}}}\n' for s, d in rows.items())
        (folder / "metrics.jsonl").write_text(text)

    found = load(str(run))

    assert assets.plain(found) == expected(assets.points(1, 20) + assets.points(21, 35, course=2))
    walls = found.curves[assets.TAGS[0]].walls
    assert walls[0] == 9000 and walls[20] == 2000 and np.isnan(walls[-1])  # clock from the events, last step from JSONL


def test_a_growing_run_reads_the_same_as_one_read_at_the_end(tmp_path):
    whole = assets.event_bytes(assets.points(1, 30), clock=1000)
    file = tmp_path / "events.out.tfevents.1.a"
    file.write_bytes(b"")
    reader = RunReader(str(tmp_path))
    rng = np.random.default_rng(0)
    position = 0
    while position < len(whole):
        position = min(len(whole), position + int(rng.integers(1, 400)))
        file.write_bytes(whole[:position])
        reader.update()
    resumed = assets.points(21, 40, course=1)
    assets.write_events(tmp_path, "2.a", resumed, clock=2000)
    assert reader.update()
    assert assets.plain(reader.run()) == expected(assets.points(1, 20) + resumed) == assets.plain(load(str(tmp_path)))
    assert not reader.update()


@st.composite
def histories(draw):
    """Attempts of a run: each starts right after a checkpoint of the one before and may die at any later step."""
    attempts, reached = [], 0
    for course in range(draw(st.integers(1, 4))):
        first = draw(st.integers(1, reached)) + 1 if course else 1
        last = first + draw(st.integers(2, 12))
        attempts.append((first, last, course))
        reached = last
    return attempts


@settings(max_examples=40, deadline=None)
@given(history=histories(), seed=st.integers(0, 2**16))
def test_any_history_of_resumes_reads_as_the_course_that_was_trained(tmp_path_factory, history, seed):
    folder = tmp_path_factory.mktemp("history")
    names = np.random.default_rng(seed).permutation(len(history))
    trained: list[tuple[str, int, float]] = []
    for (first, last, course), name in zip(history, names, strict=True):
        written = assets.points(first, last, course)
        assets.write_events(folder, f"{name}.host", written, clock=1000.0 * (course + 1))
        trained = [point for point in trained if point[1] < first] + written
    assert assets.plain(load(str(folder))) == expected(trained)


@pytest.mark.verl
def test_torch_summary_writers_with_purge_step_read_as_tensorboard_reads_them(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    for first, last, course in ((1, 30, 0), (21, 50, 1), (41, 45, 2)):
        with SummaryWriter(str(tmp_path), purge_step=first if course else None, filename_suffix=f".{course}") as writer:
            for tag, step, value in assets.points(first, last, course):
                writer.add_scalar(tag, value, step)
    theirs = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    theirs.Reload()
    run = load(str(tmp_path))
    for tag in assets.TAGS:
        read = [(event.step, event.value) for event in theirs.Scalars(tag)]
        assert assets.plain(run)[tag] == read
