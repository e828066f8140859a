"""`ckpt verify`: finds every seeded defect, says what to do, and raises no false alarm."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from defects import FIRST, SEEDED, SEEDED_DEEP, SEEDED_FP8, edit_bytes, edit_config, reindex
from tiny_checkpoints import deepseek, read_weight_map, write_checkpoint, write_shard

from ckpt_tools.deep import verify_data
from ckpt_tools.report import Report
from ckpt_tools.verify import verify

ROOT = Path(__file__).resolve().parents[2]


def cases(table: dict) -> list:
    return [
        pytest.param(kind, way, id=f"{kind}-{number}")
        for kind, ways in table.items()
        for number, way in enumerate(ways, 1)
    ]


def assert_found(report: Report, kind: str) -> None:
    assert kind in report.kinds(), f"found only {report.kinds()}"
    for finding in report.findings:
        assert finding.remedy and "\n" not in str(finding)


def test_a_sound_checkpoint_has_no_findings(tmp_path):
    assert verify(deepseek(tmp_path / "bf16", fp8=False)).findings == []
    assert verify(deepseek(tmp_path / "fp8")).findings == []


@pytest.mark.parametrize(("kind", "damage"), cases(SEEDED))
def test_a_seeded_defect_is_found(tmp_path, kind, damage):
    folder = deepseek(tmp_path / "model", fp8=False)
    damage(folder)
    assert_found(verify(folder), kind)


@pytest.mark.parametrize(("kind", "damage"), cases(SEEDED_FP8))
def test_a_seeded_fp8_defect_is_found(tmp_path, kind, damage):
    folder = deepseek(tmp_path / "model")
    damage(folder)
    assert_found(verify(folder), kind)


@pytest.mark.parametrize(("kind", "damage"), cases(SEEDED_DEEP))
def test_a_defect_of_the_data_is_found_by_reading_it(tmp_path, kind, damage):
    folder = deepseek(tmp_path / "model", fp8=False)
    sound = Report("")
    verify_data(folder, sound, store=True)
    assert sound.findings == []
    damage(folder)
    assert verify(folder).findings == [], "headers alone cannot show this"
    report = Report("")
    verify_data(folder, report)
    assert_found(report, kind)


def test_the_guide_explains_every_kind_of_finding():
    guide = (ROOT / "docs" / "ckpt.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)`", guide, re.MULTILINE))
    sources = "".join(path.read_text() for path in (ROOT / "ckpt_tools").glob("*.py"))
    raised = set(re.findall(r"report\.(?:error|warn)\(\s*\"(\w+)\"", sources))
    raised |= set(re.findall(r"(?:fault|HeaderFault|yield)\(?\s*\"(\w+)\"", sources))
    assert raised <= documented, f"not in docs/ckpt.md: {sorted(raised - documented)}"
    seeded = SEEDED.keys() | SEEDED_FP8.keys() | SEEDED_DEEP.keys()
    assert seeded <= documented
    assert len(seeded) >= 25


def test_a_truncated_file_is_named_with_expected_and_found_size(tmp_path):
    """Report D11: the loader's message names neither."""
    folder = deepseek(tmp_path / "model", fp8=False)
    size = (folder / FIRST).stat().st_size
    edit_bytes(folder / FIRST, lambda data: data[:-8])
    (finding,) = [f for f in verify(folder).findings if f.kind == "truncated"]
    assert finding.where == FIRST
    assert f"{size - 8} bytes found, {size} expected" in finding.problem


def test_tied_embeddings_may_leave_out_lm_head(tmp_path):
    """Report D12: absent because tied is not missing."""
    folder = deepseek(tmp_path / "model", fp8=False, tie_word_embeddings=True)
    assert "lm_head.weight" not in read_weight_map(folder)
    report = verify(folder)
    assert report.findings == []
    assert "tied" in report.facts["lm_head"]


def test_zero_size_and_scalar_tensors_are_legal(tmp_path):
    """Report D14: a reader that divides by the element count fails on them."""
    tensors = {"scalar": ("F32", np.float32(3).reshape(())), "none": ("BF16", np.zeros((0, 7), "<u2"))}
    folder = write_checkpoint(tmp_path / "model", [tensors], {"model_type": "other"})
    assert verify(folder).findings == []
    report = Report("")
    verify_data(folder, report, store=True)
    verify_data(folder, report)
    assert report.findings == []


def test_an_unknown_family_gets_the_generic_checks_only(tmp_path):
    tensors = {f"decoder.layers.{n}.w": ("F32", np.ones((2, 2), "<f4")) for n in (0, 1, 3)}
    folder = write_checkpoint(tmp_path / "model", [tensors], {"model_type": "strange", "num_hidden_layers": 4})
    assert verify(folder).kinds() == {"missing_layer": 1}


def test_only_headers_are_read(tmp_path):
    """The shard's data is a hole of 1 TB: reading it would take minutes and show."""
    folder = deepseek(tmp_path / "model", fp8=False)
    entry = {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "huge": entry}).encode()
    with (folder / "huge.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (1 << 40))
    report = verify(folder)
    assert report.kinds() == {"unlisted_file": 1}
    assert report.facts["read_bytes"] < 1 << 20


def test_hostile_names_do_not_reach_the_terminal(tmp_path):
    folder = deepseek(tmp_path / "model", fp8=False)
    write_shard(folder / FIRST, {"\x1b[2J\x07evil": ("F32", np.ones(1, "<f4"))})
    reindex(folder)
    run = ckpt("verify", str(folder))
    assert run.returncode == 1
    assert "\x1b" not in run.stdout + run.stderr
    assert "evil" in run.stdout


def ckpt(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "ckpt_tools", *arguments], capture_output=True, text=True, cwd=ROOT)


def test_exit_codes_mean_something(tmp_path):
    folder = deepseek(tmp_path / "model", fp8=False)
    assert ckpt("verify", str(folder)).returncode == 0
    edit_config(folder, vocab_size=7)
    wrong = ckpt("verify", str(folder), "--json")
    assert wrong.returncode == 1
    assert json.loads(wrong.stdout)["findings"][0]["kind"] == "wrong_shape"
    absent = ckpt("verify", str(tmp_path / "nothing"))
    assert absent.returncode == 2
    assert absent.stderr.count("\n") == 1


def test_help_answers_without_loading_anything_heavy():
    script = "import sys; from ckpt_tools.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    heavy = "print({'numpy', 'torch', 'numba', 'rich', 'safetensors'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script + heavy], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.endswith("set()\n")


def test_the_package_needs_nothing_of_the_project_and_no_torch():
    """Report E3: a cast needs no device, no Triton, and no framework at all."""
    sources = "".join(path.read_text() for path in (ROOT / "ckpt_tools").glob("*.py"))
    assert "atlasrl" not in sources
    assert not re.search(r"^\s*(?:import|from) (?:torch|triton|safetensors|transformers)\b", sources, re.MULTILINE)


def test_every_field_report_of_the_guide_has_its_test():
    guide = (ROOT / "docs" / "ckpt.md").read_text()
    rows = re.findall(r"^\| ([CDE]\d+) \|.*\| (.+) \|$", guide, re.MULTILINE)
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    assert len(rows) >= 20
    for report, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert f"def {name}(" in tests or f'"{name}": [' in tests, f"{report}: {name}"
        assert "`" in names, report
