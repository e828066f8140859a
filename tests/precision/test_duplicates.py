"""Duplicates leave the training data once per run, and the run says so."""

from __future__ import annotations

import itertools

import pytest

from atlasrl.errors import Fault
from atlasrl.precision import duplicates
from atlasrl.rundir import RunDir

pyarrow = pytest.importorskip("pyarrow")


def rows(names, answer="1", **extra):
    return [
        {
            "data_source": "math",
            "prompt": [{"role": "user", "content": name}],
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index},
            **extra,
        }
        for index, name in enumerate(names)
    ]


def write(path, items):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(items), path)
    return str(path)


def read(files):
    import pyarrow.parquet

    return [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


def test_the_first_of_equal_rows_stays_in_its_place(tmp_path, run, capsys, monkeypatch):
    file = write(tmp_path / "train.parquet", rows("abcabdacb" * 2_000))
    monkeypatch.setattr(duplicates, "BATCH", 1000)
    kept = read(duplicates.removed([file], run))
    assert [row["prompt"][0]["content"] for row in kept] == list("abcd")
    assert [row["extra_info"]["index"] for row in kept] == [0, 1, 2, 5]
    assert "18000 rows hold 4 different prompts; 17996 duplicates are left out" in capsys.readouterr().out
    assert run.events()[-1]["rows"] == 18_000


def test_a_second_start_reads_what_the_first_found(tmp_path, run):
    file = write(tmp_path / "train.parquet", rows("aab"))
    [first] = duplicates.removed([file], run)
    before = RunDir(run.path).events()
    assert duplicates.removed([file], run) == [first]
    assert run.events() == before
    write(tmp_path / "train.parquet", rows("aabbc"))
    assert len(read(duplicates.removed([file], run))) == 3


def test_data_without_duplicates_are_trained_on_as_they_are(tmp_path, run):
    file = write(tmp_path / "train.parquet", rows("abc"))
    assert duplicates.removed([file], run) == [file]
    assert not list((run.path / "data").glob("*.parquet"))


def test_duplicates_across_files_are_found_and_columns_survive(tmp_path, run):
    files = [write(tmp_path / f"{n}.parquet", rows(names, level=n)) for n, names in enumerate(("ab", "bc"))]
    kept = read(duplicates.removed(files, run))
    assert [(row["prompt"][0]["content"], row["level"]) for row in kept] == [("a", 0), ("b", 0), ("c", 1)]


def test_one_question_with_two_right_answers_is_kept_and_told(tmp_path, run, capsys):
    file = write(tmp_path / "train.parquet", [*rows("ab"), *rows("a", answer="2")])
    assert duplicates.removed([file], run) == [file]
    assert "1 questions come with more than one right answer" in capsys.readouterr().out


def test_rows_are_equal_exactly_when_their_hashes_are():
    """Against Python's own equality, over nested rows that differ in one place, in order, in nesting, or not at all."""
    texts = ["", "a", "b", "ab", None]
    chats = [
        [{"role": r, "content": c} for c in pair]
        for r in ("user", "system")
        for pair in itertools.product(texts, texts)
    ]
    chats += [[], [{"role": "user", "content": "a"}], *chats[::7]]
    hashes = duplicates.row_hashes(pyarrow.array(chats)[1:])
    for (i, left), (j, right) in itertools.combinations(enumerate(chats[1:]), 2):
        assert (left == right) == (hashes[i] == hashes[j]), (left, right)


def test_a_file_that_is_no_parquet_is_named(tmp_path, run):
    (tmp_path / "train.parquet").write_text("version https://git-lfs")
    with pytest.raises(Fault, match=r"train\.parquet cannot be read"):
        duplicates.removed([str(tmp_path / "train.parquet")], run)
