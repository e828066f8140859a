"""The journal survives crashes and refuses damage; a run has one writer."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import RunDir, check_name, write_atomically


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def test_journal_reads_back_what_was_recorded(run):
    run.record("created", nodes=2)
    run.record("attempt_start", attempt=1)
    assert [(e["event"], e.get("nodes"), e.get("attempt")) for e in run.events()] == [
        ("created", 2, None),
        ("attempt_start", None, 1),
    ]


def test_half_written_tail_is_left_out_then_kept_as_text(run):
    run.record("created")
    with run.journal.open("a") as file:
        file.write('{"event": "attempt_st')
    assert [event["event"] for event in run.events()] == ["created"]
    run.record("attempt_start", attempt=2)
    assert [event["event"] for event in run.events()] == ["created", "torn_line", "attempt_start"]
    assert run.events()[1]["text"] == '{"event": "attempt_st'


@pytest.mark.parametrize("damage", ["{broken}\n", "[]\n", "\x00\x00\n", "\n"])
def test_damaged_line_in_the_middle_is_named_by_file_and_line(run, damage):
    run.record("created")
    with run.journal.open("a") as file:
        file.write(damage)
    run.record("attempt_start")
    with pytest.raises(Fault, match=r"journal\.jsonl:2 "):
        run.events()


def record_many(path, writer):
    for number in range(50):
        RunDir(path).record("event", writer=writer, number=number)


def test_concurrent_writers_lose_no_line(run):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=record_many, args=(run.path, writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    seen = [(event["writer"], event["number"]) for event in run.events()]
    assert sorted(seen) == [(writer, number) for writer in range(4) for number in range(50)]


def own_until_told(path, owned, leave):
    with RunDir(path).own(attempt=7, job="4711"):
        owned.set()
        leave.wait(60)


def test_second_writer_is_refused_with_the_name_of_the_first(run):
    context = multiprocessing.get_context("spawn")
    owned, leave = context.Event(), context.Event()
    first = context.Process(target=own_until_told, args=(run.path, owned, leave))
    first.start()
    assert owned.wait(60)
    try:
        assert "job 4711" in run.writer()
        with pytest.raises(Fault, match=r"attempt 7, job 4711.*bin/stop"), run.own(attempt=8):
            pass
    finally:
        leave.set()
        first.join()
    assert run.writer() is None


def test_lock_of_a_killed_writer_is_free(run):
    context = multiprocessing.get_context("spawn")
    owned, leave = context.Event(), context.Event()
    first = context.Process(target=own_until_told, args=(run.path, owned, leave))
    first.start()
    assert owned.wait(60)
    first.kill()
    first.join()
    with run.own(attempt=8):
        assert json.loads(run.owner.read_text())["attempt"] == 8


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc", "-rf", "a b", "x\n", "é", "a" * 101])
def test_names_that_could_leave_the_folder_are_refused(name):
    with pytest.raises(UsageFault):
        check_name(name)


def test_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    target = tmp_path / "state.json"
    write_atomically(target, "old")
    with pytest.raises(TypeError):
        write_atomically(target, 3)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
