"""Training checkpoints: which steps are whole, in every layout; and which of them `ckpt prune` may remove."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_checkpoints import deepseek, tree_bytes

from ckpt_tools.cli import main
from ckpt_tools.errors import UsageFault
from ckpt_tools.prune import prune
from ckpt_tools.training import inspect, survey, verify_training


def write(path: Path, content: bytes = b"x" * 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def old_megatron(step: Path) -> None:
    """verl up to 0.7: dist_ckpt with optimizer and RNG, weights in Hugging Face form."""
    for file in (".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt"):
        write(step / "actor" / "dist_ckpt" / file)
    deepseek(step / "actor" / "huggingface", fp8=False)


def new_megatron(step: Path) -> None:
    """Layout v2 (RFC verl#5630): a folder per content, the manifest last."""
    for part in ("optimizer", "extra"):
        for file in (".metadata", "__0_0.distcp"):
            write(step / "actor" / part / "dist_ckpt" / file)
    deepseek(step / "actor" / "model" / "huggingface", fp8=False)
    contents = {
        "model": {"path": "model/huggingface"},
        "optimizer": {"path": "optimizer/dist_ckpt"},
        "rng_state": {"path": "extra/dist_ckpt"},
    }
    write(step / "actor" / "ckpt_contents.json", json.dumps({"contents": contents}).encode())


def fsdp(step: Path) -> None:
    for rank in range(2):
        for what in ("model", "optim", "extra_state"):
            write(step / "actor" / f"{what}_world_size_2_rank_{rank}.pt")
    write(step / "actor" / "huggingface" / "config.json", b"{}")


LAYOUTS = {"v1": old_megatron, "v2": new_megatron, "fsdp": fsdp}


def save(root: Path, number: int, layout: str = "fsdp", sealed: bool = True) -> Path:
    step = root / f"global_step_{number}"
    LAYOUTS[layout](step)
    write(step / "data.pt")
    if sealed:
        files = {str(p.relative_to(step)): p.stat().st_size for p in step.rglob("*") if p.is_file()}
        write(step / "COMPLETE", json.dumps({"step": number, "files": files}).encode())
    (root / "latest_checkpointed_iteration.txt").write_text(str(number))
    return step


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_whole_step_of_every_layout_is_recognised(tmp_path, layout, sealed):
    step = inspect(save(tmp_path, 10, layout, sealed))
    assert (step.layout, step.sealed, step.problems) == (layout, sealed, ())
    assert verify_training(tmp_path).findings == []


BROKEN = {
    "no data.pt": ("fsdp", lambda s: (s / "data.pt").unlink()),
    "empty data.pt": ("fsdp", lambda s: (s / "data.pt").write_bytes(b"")),
    "actor deleted": ("fsdp", lambda s: [p.unlink() for p in (s / "actor").rglob("*.pt")]),
    "a rank is missing": ("fsdp", lambda s: (s / "actor" / "model_world_size_2_rank_1.pt").unlink()),
    "two world sizes": ("fsdp", lambda s: write(s / "actor" / "model_world_size_4_rank_0.pt")),
    "an empty rank": ("fsdp", lambda s: (s / "actor" / "optim_world_size_2_rank_0.pt").write_bytes(b"")),
    "old: no metadata": ("v1", lambda s: (s / "actor" / "dist_ckpt" / ".metadata").unlink()),
    "old: lost shard": ("v1", lambda s: next((s / "actor" / "huggingface").glob("*1-of*.safetensors")).unlink()),
    "old: no dist_ckpt": ("v1", lambda s: [p.unlink() for p in (s / "actor" / "dist_ckpt").iterdir()]),
    "new: no manifest": ("v2", lambda s: (s / "actor" / "ckpt_contents.json").unlink()),
    "new: damaged manifest": ("v2", lambda s: (s / "actor" / "ckpt_contents.json").write_text("{")),
    "new: no weights": ("v2", lambda s: [p.unlink() for p in (s / "actor" / "model").rglob("*.safetensors")]),
    "new: empty data": ("v2", lambda s: (s / "actor" / "extra" / "dist_ckpt" / "__0_0.distcp").write_bytes(b"")),
    "new: way out": (
        "v2",
        lambda s: (s / "actor" / "ckpt_contents.json").write_text('{"contents": {"model": {"path": "../../x"}}}'),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_step_is_reported_without_our_manifest(tmp_path, name):
    layout, damage = BROKEN[name]
    damage(save(tmp_path, 10, layout, sealed=False))
    report = verify_training(tmp_path)
    assert "training_step" in report.kinds()
    assert report.kinds()["tracker"] == 1, "the tracker points to a step that cannot be loaded"


@pytest.mark.parametrize("damage", ["shorter", "missing", "of another step", "not JSON"])
def test_the_complete_manifest_is_held_against_the_files(tmp_path, damage):
    step = save(tmp_path, 10)
    file = step / "actor" / "optim_world_size_2_rank_1.pt"
    if damage == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    else:
        (step / "COMPLETE").write_text('{"step": 9, "files": {}}' if damage == "of another step" else "{")
    assert verify_training(step).exit_code == 1


@pytest.mark.parametrize("text", ["99", "", "ten", "10\x00"])
def test_a_tracker_pointing_nowhere_is_an_error(tmp_path, text):
    save(tmp_path, 10)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert "newest whole step is 10" in verify_training(tmp_path).errors[0].remedy


def test_a_tracker_behind_the_newest_step_is_a_warning(tmp_path):
    save(tmp_path, 20)
    save(tmp_path, 10)
    report = verify_training(tmp_path)
    assert (report.errors, report.kinds()["tracker"]) == ([], 1)


@pytest.fixture
def root(tmp_path):
    for number in (10, 20, 30, 40, 50):
        save(tmp_path / "checkpoints", number)
    return tmp_path / "checkpoints"


def steps(root: Path) -> list[int]:
    return sorted(step.number for step in survey(root))


def test_nothing_is_removed_without_apply(root):
    before = tree_bytes(root)
    gone = [verdict.step.number for verdict in prune(root, keep=2) if not verdict.stays]
    assert gone == [30, 20, 10]
    assert tree_bytes(root) == before


def test_the_newest_and_the_pinned_stay(root):
    (root / "global_step_10" / "PINNED").touch()
    prune(root, keep=1, pinned=[20], apply=True)
    assert steps(root) == [10, 20, 50]


def test_the_newest_whole_step_stays_when_newer_ones_are_broken(root):
    for number in (40, 50):
        (root / f"global_step_{number}" / "data.pt").unlink()
    prune(root, keep=1, broken=True, apply=True)
    assert steps(root) == [30, 40, 50], "what is newer than the newest whole step may be in the making"


def test_broken_steps_go_only_when_asked_for(root):
    (root / "global_step_20" / "data.pt").unlink()
    prune(root, keep=4, apply=True)
    assert steps(root) == [10, 20, 30, 40, 50]
    prune(root, keep=4, broken=True, apply=True)
    assert steps(root) == [10, 30, 40, 50]


def test_with_no_whole_step_nothing_goes(root):
    for data in root.glob("*/data.pt"):
        data.unlink()
    prune(root, keep=1, broken=True, apply=True)
    assert steps(root) == [10, 20, 30, 40, 50]


def test_links_are_neither_followed_nor_removed(root, tmp_path):
    elsewhere = save(tmp_path / "elsewhere", 7)
    (root / "global_step_7").symlink_to(elsewhere)
    (root / "global_step_10" / "actor" / "link").symlink_to(elsewhere)
    (root / "global_step_20" / "linked_file.pt").symlink_to(elsewhere / "data.pt")
    before = tree_bytes(tmp_path / "elsewhere")
    prune(root, keep=1, broken=True, apply=True)
    assert (root / "global_step_7").is_symlink()
    assert tree_bytes(tmp_path / "elsewhere") == before


def test_a_root_that_is_a_link_is_refused(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(UsageFault, match="is a link"):
        prune(tmp_path / "link", keep=1, apply=True)


def test_keeping_none_is_refused(root):
    run = CliRunner().invoke(main, ["prune", str(root), "--keep", "0", "--apply"])
    assert run.exit_code == 2
    assert steps(root) == [10, 20, 30, 40, 50]


def test_dry_run_wins_over_apply(root):
    run = CliRunner().invoke(main, ["prune", str(root), "--keep", "1", "--apply", "--dry-run", "--json"])
    assert json.loads(run.stdout)["removed"] is False
    assert steps(root) == [10, 20, 30, 40, 50]


def test_foreign_files_in_the_root_stay(root):
    (root / "global_step_notes").mkdir()
    (root / "notes.txt").write_text("mine")
    prune(root, keep=1, broken=True, apply=True)
    assert (root / "notes.txt").exists()
    assert (root / "global_step_notes").exists()
