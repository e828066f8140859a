"""Faults planted in real runs of a tiny DeepSeek-V3, one at a time: bin/probe auto names each, and no clean seed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_assets import make_assets, recipe_tree, write_plan

from atlasrl.precision import auto, stress
from atlasrl.rundir import RunDir

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

PYLIB = Path(__file__).parents[2] / "pylib"
PLANTED = Path(__file__).parent / "planted"
DEADLINE = 900


@pytest.fixture(scope="module")
def ray_address():
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_worker_niceness", "0")
    context = ray.init(address="local", num_cpus=16, resources={"NPU": 1}, include_dashboard=False, log_to_driver=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"))


def train(folder: Path, assets: dict, address: str, plugin: str = "", **changes) -> RunDir:
    """Two steps that record everything; a run that a check of ours ends is a result too."""
    run = write_plan(folder, recipe_tree(assets, rollout__record=True, probe={"syncs": 3}, **changes), assets)
    attempt = run.attempt(1)
    attempt.path.mkdir(parents=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PYLIB), str(PLANTED)]), "RAY_ADDRESS": address}
    if plugin:
        environment["VERL_USE_EXTERNAL_MODULES"] = plugin
    with (attempt.path / "train.log").open("w") as log:
        command = [sys.executable, "-m", "atlasrl.trainer", str(run.path), "--attempt", "1"]
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=DEADLINE).returncode
    assert code in (0, 1), (attempt.path / "train.log").read_text()[-3000:]
    return run


@pytest.fixture(scope="module")
def baseline(tmp_path_factory, assets, ray_address):
    return train(tmp_path_factory.mktemp("runs") / "baseline", assets, ray_address)


def shuffled(assets, folder):
    import pandas

    rows = pandas.read_parquet(assets["train.parquet"])
    rows.iloc[::-1].to_parquet(folder / "train.parquet")
    return {"train.parquet": folder / "train.parquet"}


def retemplated(assets, folder):
    shutil.copytree(assets["model"], folder / "model")
    for file in (folder / "model").glob("*"):
        if file.suffix in (".json", ".jinja") and "{% if add_generation_prompt %}=" in (text := file.read_text()):
            file.write_text(text.replace("{% if add_generation_prompt %}=", "{% if add_generation_prompt %}#"))
    return {"model": folder / "model"}


def rerewarded(assets, folder):
    text = assets["reward.py"].read_text().replace('"8", "+"', '"+"')
    (folder / "reward.py").write_text(text)
    return {"reward.py": folder / "reward.py"}


def coarse_bias(assets, folder):
    """The expert bias went through BF16, as a converter that casts every tensor alike does it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(assets["model"], folder / "model")
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = (tensors[name] + 0.1001).to(torch.bfloat16).float()
    save_file(tensors, file, {"format": "pt"})
    return {"model": folder / "model"}


def unplanted_bias(assets, folder):
    import torch  # noqa: F401
    from safetensors.torch import load_file, save_file

    shutil.copytree(assets["model"], folder / "model")
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = tensors[name] + 0.1001
    save_file(tensors, file, {"format": "pt"})
    return {"model": folder / "model"}


def named(run: RunDir, baseline: RunDir) -> str:
    """The cause that bin/probe auto names; the whole walk is printed for whoever reads a failure."""
    axes = auto.walk(run, baseline)
    print(auto.text(run, baseline, axes))
    found = auto.cause(axes)
    return found.what if found else ""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"optimizer__learning_rate": 3e-3}, "actor.optim.lr: 0.003 here, 0.001 in the baseline"),
        (shuffled, "other prompts or another order in the file"),
        (retemplated, "the same prompt becomes other tokens"),
        (rerewarded, "files.reward"),
        ("planted_scale", "softmax scale of 2 attention layers is wrong"),
        ("planted_skip", "o_proj.weight differs between training and rollout after the sync"),
        ("planted_stale", "W_UV"),
    ],
    ids=lambda value: (
        value if isinstance(value, str) and value.startswith("planted") else getattr(value, "__name__", None)
    ),
)
def test_a_planted_fault_is_named(tmp_path, assets, baseline, ray_address, fault, words):
    plugin = fault if isinstance(fault, str) else ""
    changes = fault if isinstance(fault, dict) else {}
    changed = fault(assets, tmp_path) if callable(fault) else {}
    run = train(tmp_path / "run", assets | changed, ray_address, plugin, **changes)
    assert words in named(run, baseline)


def test_an_expert_bias_cast_to_bf16_is_named(tmp_path, assets, ray_address):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    fine = train(tmp_path / "fine", assets | unplanted_bias(assets, tmp_path / "a"), ray_address)
    coarse = train(tmp_path / "coarse", assets | coarse_bias(assets, tmp_path / "b"), ray_address)
    assert "e_score_correction_bias" in named(coarse, fine)


def test_a_device_that_flips_bits_is_named(tmp_path, baseline, monkeypatch):
    """The stress test's own report of three devices, one of which multiplies wrongly, beside a clean run."""
    import torch

    run = RunDir(shutil.copytree(baseline.path, tmp_path / "run"))
    right = stress.work(64, 2, "cpu", memory=1 << 12)

    def flipping(left, right, multiply=torch.matmul):
        product = multiply(left, right)
        product[0, 0] = -product[0, 0]
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", flipping)
    wrong = stress.work(64, 2, "cpu", memory=1 << 12)
    monkeypatch.undo()
    reports = [
        stress.Report("node0", str(i), "cpu", done["digests"], done["seconds"])
        for i, done in enumerate((right, wrong, right))
    ]
    verdict = stress.judge(reports)
    (run.path / "stress.json").write_text(json.dumps(stress.as_json(reports, verdict)))
    assert "device 1" in named(run, baseline)


@pytest.mark.parametrize("seed", [8, 9])
def test_a_clean_seed_is_not_accused(tmp_path, assets, baseline, ray_address, seed):
    assert named(train(tmp_path / "run", assets, ray_address, seed=seed), baseline) == ""
