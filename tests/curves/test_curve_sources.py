"""Every source holds the same curve: what is written in one format reads like what is written in another."""

from __future__ import annotations

import gzip
import json

import curve_assets as assets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlasrl.curves import aliases
from atlasrl.curves.load import load
from atlasrl.errors import Fault, UsageFault

TAG = "critic/rewards/mean"
CURVE = [(1, -0.5), (2, 0.25), (3, 1e-06)]


def write(tmp_path, name: str, text: str) -> str:
    file = tmp_path / name
    file.write_text(text)
    return str(file)


def read(spec: str) -> dict:
    return assets.plain(load(spec))


SAME_CURVE = {
    "verl.jsonl": "".join(json.dumps({"step": s, "data": {TAG: v}}) + "\n" for s, v in CURVE),
    "wandb-history.jsonl": "".join(json.dumps({"_step": s, "_timestamp": 9.5, TAG: v}) + "\n" for s, v in CURVE),
    "trainer_state.json": json.dumps({"log_history": [{"step": s, TAG: v} for s, v in CURVE]}),
    "wide.csv": f"step,{TAG},note\n" + "".join(f"{s},{v},text\n" for s, v in CURVE),
    "long.csv": "metric,step,value\n" + "".join(f"{TAG},{s},{v!r}\n" for s, v in CURVE),
    "wandb.csv": f'"Step","r1 - {TAG}","r1 - {TAG}__MIN","r1 - {TAG}__MAX"\n'
    + "".join(f'"{s}","{v}","0","0"\n' for s, v in CURVE),
    "train.log": "".join(f"(TaskRunner pid=7) step:{s} - {TAG}:{v} - actor/lr:1e-06\n" for s, v in CURVE),
}


@pytest.mark.parametrize("name", SAME_CURVE)
def test_each_format_reads_as_the_same_curve(tmp_path, name):
    assert read(write(tmp_path, name, SAME_CURVE[name]))[TAG] == CURVE


def test_gzipped_tables_and_the_csv_of_tensorboards_download_button_are_read(tmp_path):
    packed = tmp_path / "long.csv.gz"
    packed.write_bytes(gzip.compress(SAME_CURVE["long.csv"].encode()))
    assert read(str(packed))[TAG] == CURVE
    table = "Wall time,Step,Value\n1700000000.5,1,0.25\n"
    assert read(write(tmp_path, "run-npu-tag-reward.csv", table)) == {"reward": [(1, 0.25)]}


def test_files_of_several_formats_are_attempts_of_one_run_in_the_order_given(tmp_path):
    first = write(tmp_path, "console.log", "".join(f"step:{s} - a:{s}.0 - b:1\n" for s in range(1, 31)))
    second = assets.write_events(tmp_path, "1.host", [("a", step, 100.0 + step) for step in range(21, 25)], clock=5)
    run = load(f"npu={first},{second}")
    assert assets.plain(run)["a"] == [(s, float(s)) for s in range(1, 21)] + [(s, 100.0 + s) for s in range(21, 25)]
    assert run.reading.replaced == 20


def test_verls_console_is_read_among_everything_else_on_the_screen(tmp_path):
    text = (
        "\x1b[36m(TaskRunner pid=1)\x1b[0m 1%|▏ | 1/100 step:1 - a/b:np.float64(0.5) - val-core/x/acc/mean@1:0.25\n"
        "(WorkerDict pid=9) INFO step: 3 of the wrong form - x:1\n"
        "step:2 - a/b:nan - name:abc - c:-1e-06 - d:inf [repeated 2x across cluster]\n"
        "step:3 - a/b:0.7"  # not finished yet
    )
    run = load(write(tmp_path, "train.out", text))
    found = assets.plain(run)
    assert found["val-core/x/acc/mean@1"] == [(1, 0.25)]
    assert found["a/b"][0] == (1, 0.5) and found["a/b"][1][1] != found["a/b"][1][1]
    assert found["c"] == [(2, -1e-06)] and found["d"] == [(2, float("inf"))]
    assert set(found) == {"a/b", "c", "d", "val-core/x/acc/mean@1"}
    assert any("unfinished" in note for note in run.reading.notes)


def test_a_verl_log_that_was_started_anew_is_read_anew(tmp_path):
    """verl's FileLogger opens its file with "w": the old attempt's lines are gone."""
    from atlasrl.curves.load import RunReader

    file = write(tmp_path, "m.jsonl", "".join(f'{{"step": {s}, "data": {{"a": 1.0}}}}\n' for s in range(1, 30)))
    reader = RunReader(file)
    reader.update()
    write(tmp_path, "m.jsonl", '{"step": 5, "data": {"a": 2.0}}\n')
    assert reader.update()
    assert assets.plain(reader.run()) == {"a": [(5, 2.0)]}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "m.jsonl",
            '{"step": 1, "data": {"a": 1}}\n{"step": 2, "da\n',
            r"m.jsonl:2 is not a JSON object.*--allow-truncated",
        ),
        ("m.jsonl", '{"data": {"a": 1}}\n', r"m.jsonl:1 has no step; looked for step, _step"),
        ("t.csv", "step,a\n1,0.5\n2,oops\n", r"t.csv:3: 'oops' is no number"),
        ("t.csv", "epoch,a\n1,0.5\n", r"has no step column; found epoch, a"),
        ("t.csv", "step,a\n1.5,2\n", r"t.csv:2: the step '1.5' is no whole number"),
        ("t.csv", "Step,r1 - a,r2 - a\n1,2,3\n", r"holds several runs \(r1, r2\); export one run per file"),
        ("t.csv", "", "is an empty table"),
        ("s.json", '{"a": 1}', "is no trainer_state.json"),
        ("x.log", "nothing here\n", "holds no scalar"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_where(tmp_path, name, text, message):
    with pytest.raises(Fault, match=message):
        load(write(tmp_path, name, text))


def test_lines_before_damage_are_read_when_that_is_allowed(tmp_path):
    file = write(tmp_path, "m.jsonl", '{"step": 1, "data": {"a": 1}}\n{"step"\n{"step": 3, "data": {"a": 3}}\n')
    run = load(file, allow_truncated=True)
    assert assets.plain(run) == {"a": [(1, 1.0)]}
    assert any("m.jsonl:2" in note for note in run.reading.notes)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(SAME_CURVE)))
def test_no_text_crashes_a_reader(tmp_path_factory, data, name):
    """Valid files with bytes inserted, removed or replaced: read, or an error of one line."""
    broken = bytearray(SAME_CURVE[name].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(broken)))
        broken[at : at + data.draw(st.integers(0, 6))] = data.draw(
            st.sampled_from(
                [b"", b"9" * 400, b"nan", b"-inf", b"1e999", b"\0", b'"', b"\n", b",", b"{", b"\xff", b"null"]
            )
        )
    file = tmp_path_factory.mktemp("text") / name
    file.write_bytes(bytes(broken))
    try:
        load(str(file))
    except Fault as fault:
        assert "\n" not in str(fault)


def test_a_folder_with_several_runs_is_refused_with_their_names(tmp_path):
    for name in ("a", "b"):
        assets.write_events(tmp_path / name, "1.h", [("x", 1, 1.0)], clock=1)
    with pytest.raises(UsageFault, match=r"holds 2 TensorBoard runs; name one of .*a, .*b"):
        load(str(tmp_path))
    with pytest.raises(UsageFault, match="no such run: nowhere"):
        load("nowhere")


@pytest.mark.parametrize(
    ("framework", "tag", "metric"),
    [
        ("trl", "train/completions/mean_length", "response_length"),
        ("openrlhf", "train/policy_loss", "loss"),
        ("nemo-rl", "train/mean_gen_tokens_per_sample", "response_length"),
        ("mindspeed-rl", "grpo/rewards/mean", "reward"),
        ("verl", "training/rollout_probs_diff_mean", "rollout_probability_difference"),
    ],
)
def test_the_names_of_other_frameworks_are_known(tmp_path, framework, tag, metric):
    run = load(write(tmp_path, "m.jsonl", json.dumps({"step": 1, tag: 0.5}) + "\n"))
    found = aliases.find(run, aliases.known()[metric])
    assert found is not None and found[0] == tag


def test_a_metric_can_be_given_its_tag():
    metrics = aliases.with_changes(["reward=my/score", "accuracy=val/acc"])
    assert metrics["reward"].tags == ("my/score",) and metrics["accuracy"].title == "accuracy"
    with pytest.raises(UsageFault, match="is not NAME=TAG"):
        aliases.with_changes(["reward"])
