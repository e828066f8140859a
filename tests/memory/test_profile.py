"""Profiles: planted facts are found again, in both layouts, and damage is an error that names the file."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tables import MB, OPERATORS, START, Row, msprof_module, operator_line, torch_npu_record

from atlasrl import recipe as recipes
from atlasrl.errors import Fault, UsageFault
from atlasrl.memory import ascend, profile, rss, snapshot, verdict
from atlasrl.memory.curve import Curve
from atlasrl.memory.job import GIB


def seconds(count: int) -> np.ndarray:
    return np.linspace(0, 100, count, endpoint=False)


def saw(t: float, base: float = 1000, height: float = 500) -> float:
    return base + height * (t % 5) / 5


@pytest.mark.parametrize("layout", [torch_npu_record, msprof_module])
def test_a_planted_peak_is_found_to_the_byte_in_both_layouts(tmp_path, layout):
    name = "memory_record.csv" if layout is torch_npu_record else "npu_module_mem_20260101.csv"
    rows = [Row("APP", t, saw(t)) for t in seconds(5000)]
    rows[3210] = Row("APP", rows[3210].seconds, 61_234.5)
    rows[40] = Row("APP", rows[40].seconds, None)
    layout(tmp_path / name, rows)
    (found,) = profile.read(tmp_path)
    assert found.total.peak == 61_234.5 * MB
    assert found.total.peak_time == pytest.approx(START + rows[3210].seconds * 1e6, abs=1)
    assert found.total.count == len(rows) - 1, "a row of which only the release was seen does not count"


def test_hccl_share_and_framework_curves(tmp_path):
    msprof_module(
        tmp_path / "npu_module_mem_1.csv",
        [Row(c, t, size) for t in seconds(50) for c, size in (("APP", 40_000), ("HCCL", 8_000), ("SLOG", 0))],
    )
    torch_npu_record(tmp_path / "memory_record.csv", [Row("PTA", t, 30_000, saw(t)) for t in seconds(50)])
    (found,) = profile.read(tmp_path)
    assert profile.hccl_share(found) == 0.2
    assert found.curves["PTA"].peak == 30_000 * MB
    assert found.curves["PTA allocated"].peak == pytest.approx(max(map(saw, seconds(50))) * MB)
    assert "SLOG" not in found.curves


@pytest.mark.parametrize("per_second", [0, 3, 40])
def test_leaks_are_told_from_saws(tmp_path, per_second):
    rng = np.random.default_rng(0)
    rows = [Row("PTA", t, 30_000, saw(t) + per_second * t + rng.uniform(0, 5)) for t in seconds(20_000)]
    torch_npu_record(tmp_path / "memory_record.csv", rows)
    (found,) = profile.read(tmp_path)
    growing = profile.leak(found)
    if per_second == 0:
        assert growing is None
    else:
        assert growing[0] == "PTA allocated"
        assert growing[1] / MB == pytest.approx(per_second, rel=0.05)


def cycles(after_sleep: float, count: int = 4) -> tuple[list[Row], profile.Marks]:
    """Rollouts at 50,000 MB for 10 s, then training that starts at `after_sleep` and saws 10 s."""
    rows, times, names = [], [], []
    for cycle in range(count):
        begin = 20.0 * cycle
        times += [begin, begin + 10]
        names += ["gen", "update_actor"]
        rows += [Row("APP", begin + t, 50_000 + (t % 1)) for t in np.arange(0, 10, 0.05)]
        rows += [Row("APP", begin + 10 + t, after_sleep + 900 * (t % 2)) for t in np.arange(0, 10, 0.05)]
    return rows, profile.Marks(START + np.array(times) * 1e6, tuple(names))


@pytest.fixture(scope="module")
def prediction():
    return verdict.of_recipe(recipes.load("deepseek-v3-671b-dapo")).prediction


@pytest.mark.parametrize(
    ("after", "words"), [(6_000, "as predicted"), (36_000, "NOT the weights"), (49_500, "did not work")]
)
@pytest.mark.parametrize("marked", [True, False])
def test_what_sleep_released_is_judged(tmp_path, prediction, after, words, marked):
    """Also with phases that only the curve tells, as long as there is something to see."""
    rows, marks = cycles(after)
    torch_npu_record(tmp_path / "memory_record.csv", rows)
    (found,) = profile.read(tmp_path, marks if marked else profile.NO_MARKS)
    if not marked and after > 40_000:
        assert profile.sleeps(found) == []
        return
    assert all(s.released == pytest.approx((50_000 - after) * MB, rel=0.02) for s in profile.sleeps(found))
    assert len(profile.sleeps(found)) == 4
    if marked or after < 10_000:
        assert words in profile.sleep_verdict(profile.sleeps(found), prediction)


def test_phases_are_compared_with_the_prediction(tmp_path, prediction):
    rows, marks = cycles(6_000)
    torch_npu_record(tmp_path / "memory_record.csv", rows)
    (found,) = profile.read(tmp_path, marks)
    peaks = profile.phase_peaks(found)
    assert peaks["gen"] == pytest.approx(50_001 * MB, rel=1e-4)
    assert peaks["update_actor"] == pytest.approx(7_800 * MB, rel=0.01)
    text = "\n".join(profile.lines(found, prediction))
    expected = max(stage.peaks["update"] for stage in prediction.stages)
    assert f"highest in update_actor, predicted {expected / GIB:.2f}" in text


def test_holders_at_the_peak(tmp_path):
    lines = [operator_line("aten::early", 5_000, 1, 2, 5), operator_line("aten::linear", 1_000_000, 3, 50, 1000)]
    lines += [operator_line("aten::linear", 500_000, 4, None, 1500), operator_line("aten::mul", 300_000, 5, 6, 1800)]
    lines += [operator_line("aten::late", 200, 7, 8, 1500), operator_line("", -4_000, 8, 9, 100)]
    (tmp_path / "operator_memory.csv").write_text(OPERATORS + "".join(lines))
    (found,) = profile.read(tmp_path)
    assert dict(found.operators.holders) == {"aten::linear": 1_500_000 * 1024, "aten::mul": 300_000 * 1024}


def test_ranks_are_read_apart(tmp_path):
    for rank in (0, 1):
        folder = tmp_path / f"rank{rank}_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
        folder.mkdir(parents=True)
        torch_npu_record(folder / "memory_record.csv", [Row("APP", t, 100 + rank) for t in range(5)])
    assert [p.total.peak / MB for p in profile.read(tmp_path)] == [100, 101]


def test_a_line_that_a_crash_cut_is_left_out(tmp_path):
    file = torch_npu_record(tmp_path / "memory_record.csv", [Row("APP", t, 100) for t in range(50)])
    file.write_bytes(file.read_bytes() + b"APP,17067044")
    (found,) = profile.read(tmp_path)
    assert found.total.count == 50


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: "", "is empty"),
        (lambda text: text.replace("Total Reserved", "Total Preserved"), "no column 'Total Reserved'"),
        (lambda text: text.replace("Total Active", "Total Reserved"), "names a column twice"),
        (lambda text: text.replace("(MB)", "(furlongs)"), "unit"),
        (lambda text: text.replace("APP,", "APP;", 3), "another width"),
        (lambda text: text.replace(",100,", ",ten,"), "damaged"),
    ],
)
def test_damage_is_one_line_that_names_the_file(tmp_path, damage, words):
    file = torch_npu_record(tmp_path / "memory_record.csv", [Row("APP", t, 100) for t in range(50)])
    file.write_text(damage(file.read_text()))
    with pytest.raises(Fault) as fault:
        profile.read(tmp_path)
    assert words in str(fault.value)
    assert "memory_record.csv" in str(fault.value)
    assert "\n" not in str(fault.value)


def test_times_that_a_spreadsheet_rounded_are_noted(tmp_path):
    file = torch_npu_record(tmp_path / "memory_record.csv", [Row("APP", t, 100 + t) for t in range(50)])
    rounded = [
        ",".join([*line.split(",")[:1], "1.69512E+15", *line.split(",")[2:]])
        for line in file.read_text().splitlines()[1:]
    ]
    file.write_text("\n".join([file.read_text().splitlines()[0], *rounded]) + "\n")
    (found,) = profile.read(tmp_path)
    assert any("spreadsheet" in note for note in found.notes)


def test_a_folder_without_tables_says_how_to_profile(tmp_path):
    with pytest.raises(UsageFault, match="export type Text"):
        profile.read(tmp_path)


def test_a_table_reads_alike_in_blocks_of_any_size(tmp_path, monkeypatch):
    rows = [Row(c, t, saw(t)) for t in seconds(500) for c in ("APP", "HCCL", f"op{int(t)}")]
    torch_npu_record(tmp_path / "memory_record.csv", rows)
    (whole,) = profile.read(tmp_path)
    monkeypatch.setattr(ascend, "BLOCK", 1000)
    (cut,) = profile.read(tmp_path)
    assert {n: (c.peak, c.peak_time, c.count) for n, c in cut.curves.items()} == {
        n: (c.peak, c.peak_time, c.count) for n, c in whole.curves.items()
    }
    monkeypatch.setattr(ascend, "BLOCK", 50)
    with pytest.raises(Fault, match=r"memory_record\.csv has a line of over"):
        profile.read(tmp_path)


def test_a_curve_does_not_depend_on_its_blocks():
    rng = np.random.default_rng(1)
    times, values = np.sort(rng.uniform(0, 1e8, 100_000)), rng.uniform(0, 1e9, 100_000)
    marks = np.array([1e7, 5e7])
    whole = Curve(marks)
    whole.add(times, values)
    cut = Curve(marks)
    for part in np.split(np.arange(len(times)), np.sort(rng.integers(0, len(times), 37))):
        cut.add(times[part], values[part])
    assert (cut.peak, cut.peak_time, cut.count) == (whole.peak, whole.peak_time, whole.count)
    for extreme in ("interval_low", "interval_high", "interval_first", "interval_last"):
        assert (getattr(cut, extreme) == getattr(whole, extreme)).all()
    for low_or_high, extreme in ((1, min), (2, max)):
        assert extreme(cut.envelope()[low_or_high]) == extreme(values)
    assert len(cut.envelope()[0]) < 9000


def write_snapshot(path, history=()):
    block = {
        "size": 600,
        "state": "active_allocated",
        "address": 1000,
        "frames": [{"filename": "/x/train.py", "line": 7, "name": "step"}],
    }
    idle = {"size": 424, "state": "inactive", "address": 1600}
    tree = {
        "segments": [{"device": 0, "address": 1000, "total_size": 1024, "blocks": [block, idle]}],
        "device_traces": [list(history)],
    }
    path.write_bytes(pickle.dumps(tree))
    return path


def test_a_snapshot_is_replayed_to_its_peak(tmp_path):
    frames = [
        {"filename": "/site-packages/torch/nn/x.py", "line": 1, "name": "f"},
        {"filename": "/x/model.py", "line": 3, "name": "forward"},
    ]
    history = [
        {"action": "alloc", "addr": 1000, "size": 600, "frames": []},
        {"action": "alloc", "addr": 5000, "size": 4000, "frames": frames},
        {"action": "free_requested", "addr": 5000, "size": 4000},
        {"action": "free_completed", "addr": 5000, "size": 4000, "frames": []},
        {"action": "alloc", "addr": 9000, "size": 100, "frames": []},
        {"action": "free_completed", "addr": 9000, "size": 100, "frames": []},
    ]
    found = snapshot.read(write_snapshot(tmp_path / "s.pickle", history))
    assert (found.reserved, found.allocated, found.idle, found.peak) == (1024, 600, 424, 4600)
    assert found.holders["model.py:3 forward"] == 4000


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/never",))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Evil()),
        pickle.dumps({"segments": [Evil()]}),
        b"",
        b"junk",
        pickle.dumps([1]),
        pickle.dumps({"segments": 3}),
    ],
)
def test_a_foreign_pickle_runs_nothing(tmp_path, content, monkeypatch):
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("code of the pickle ran"))
    (tmp_path / "s.pickle").write_bytes(content)
    with pytest.raises(Fault, match="is no memory snapshot"):
        snapshot.read(tmp_path / "s.pickle")


def test_resident_memory_is_sampled_until_the_process_ends(tmp_path):
    file = tmp_path / "rss.jsonl"
    hold = (
        "import sys; block = bytearray(b'x') * (80 << 20); del block; print('held', flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    sampler = threading.Thread(target=rss.sample, args=(process.pid, file, 0.02), daemon=True)
    sampler.start()
    limit = time.monotonic() + 20
    while not (file.exists() and file.read_text().endswith("\n")) and time.monotonic() < limit:
        sampler.join(0.01)
    process.communicate(b"\n")
    sampler.join(20)
    assert not sampler.is_alive(), "the sampler ends with the process"
    peaks = [line["peak"] for line in map(json.loads, file.read_text().splitlines())]
    assert max(peaks) > 80 << 20, "the kernel's mark keeps what no sample saw"


def test_the_high_water_mark_starts_again():
    block = bytearray(b"x") * (64 << 20)
    del block
    high = rss.status()["peak"]
    rss.reset_peak()
    assert rss.status()["peak"] < high - (32 << 20)


def test_tables_names_units(tmp_path):
    file = msprof_module(tmp_path / "npu_module_mem_0.csv", [Row("APP", 0, 1)])
    (table,) = ascend.tables(file)
    assert (table.kind, table.scale("Total Reserved")) == ("module", 1024)
