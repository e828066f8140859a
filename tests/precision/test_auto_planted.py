"""Faults planted in real runs of a tiny DeepSeek-V3, one at a time: bin/probe auto names each, and no clean seed.

ATLASRL_PLANTED_RUNS=FOLDER keeps the runs in a folder of yours; a run that is there already is not trained again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from trainer_assets import make_assets, recipe_tree, write_plan

from atlasrl.cli import probe
from atlasrl.rundir import RunDir

pytestmark = [pytest.mark.cluster, pytest.mark.nightly]

PYLIB = Path(__file__).parents[2] / "pylib"
PLANTED = Path(__file__).parent / "planted"
DEADLINE = 600


class Workshop:
    """Trains runs of two steps that record everything, all on one Ray."""

    def __init__(self, folder: Path, address: str):
        self.folder, self.address = folder, address
        self.assets = make_assets(folder / "assets")
        change_bias(self.assets["model"], lambda bias: bias + 0.1001)  # no number of BF16

    def train(self, name: str, made=None, plugin: str = "", **changes) -> RunDir:
        """A run; one that a check of ours ends early is a result too.

        Args:
            made: makes other inputs for it, given those of the baseline and a folder.
            plugin: module of `planted` that every worker loads.
            changes: of the recipe.
        """
        run = RunDir(self.folder / name)
        code = run.path / "code"
        if code.is_file():
            return run
        shutil.rmtree(run.path, ignore_errors=True)
        run.path.mkdir(parents=True)
        assets = self.assets | (made(self.assets, run.path) if made else {})
        recorded = {"rollout__record": True, "probe__syncs": 3, "checkpoint__save_every": 2}
        write_plan(run.path, recipe_tree(assets, **recorded, **changes), assets)
        attempt = run.attempt(1)
        attempt.logs.mkdir(parents=True)
        trainlog = attempt.logs / "train-node0.log"
        environment = {"PYTHONPATH": f"{PYLIB}{os.pathsep}{PLANTED}", "RAY_ADDRESS": self.address}
        environment |= {"VERL_USE_EXTERNAL_MODULES": plugin} if plugin else {}
        with trainlog.open("w") as log:
            command = [sys.executable, "-m", "atlasrl.trainer", str(run.path), "--attempt", "1"]
            done = subprocess.run(command, stdout=log, stderr=log, env=os.environ | environment, timeout=DEADLINE)
        assert done.returncode in (0, 1), trainlog.read_text()[-3000:]
        code.write_text(str(done.returncode))
        return run


@pytest.fixture(scope="module")
def workshop(tmp_path_factory, three_devices):
    kept = os.environ.get("ATLASRL_PLANTED_RUNS")
    folder = Path(kept).absolute() if kept else tmp_path_factory.mktemp("planted")
    return Workshop(folder, three_devices.address_info["gcs_address"])


@pytest.fixture(scope="module")
def baseline(workshop):
    return workshop.train("baseline")


def auto(run: RunDir, baseline: RunDir) -> str:
    """The cause that bin/probe auto names. The whole walk is printed for whoever reads a failure."""
    done = CliRunner().invoke(probe.main, ["auto", str(run.path), str(baseline.path)])
    print(done.output)
    named = [line for line in done.output.splitlines() if line.startswith("cause: ")]
    assert done.exit_code == len(named), done.output
    return named[0] if named else ""


def change_bias(model: Path, change) -> None:
    """Change the expert biases of a checkpoint."""
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = change(tensors[name])
    save_file(tensors, file, {"format": "pt"})


def shuffled(assets, folder):
    import pandas

    rows = pandas.read_parquet(assets["train.parquet"])
    rows.iloc[::-1].to_parquet(folder / "train.parquet")
    return {"train.parquet": folder / "train.parquet"}


def retemplated(assets, folder):
    shutil.copytree(assets["model"], folder / "model")
    file = folder / "model" / "chat_template.jinja"
    file.write_text(file.read_text().replace("{% if add_generation_prompt %}=", "{% if add_generation_prompt %}#"))
    return {"model": folder / "model"}


def rerewarded(assets, folder):
    (folder / "reward.py").write_text(assets["reward.py"].read_text().replace('"8", "+"', '"+"'))
    return {"reward.py": folder / "reward.py"}


def coarse_bias(assets, folder):
    """The expert bias went through BF16, as a converter that casts every tensor alike does it."""
    shutil.copytree(assets["model"], folder / "model")
    change_bias(folder / "model", lambda bias: bias.bfloat16().float())
    return {"model": folder / "model"}


FAULTS = {
    "learning-rate": ({"optimizer__learning_rate": 3e-3}, "actor.optim.lr: 0.003 here, 0.001 in the baseline"),
    "data-shuffled": ({"made": shuffled}, "other prompts or another order in the file"),
    "template": ({"made": retemplated}, "the same prompt becomes other tokens"),
    "reward": ({"made": rerewarded}, "files.reward"),
    "bias-in-bf16": ({"made": coarse_bias}, "e_score_correction_bias: another checkpoint, conversion or dtype"),
    "scale": ({"plugin": "planted_scale"}, "softmax scale of 2 attention layers is wrong"),
    "sync-skips-a-tensor": ({"plugin": "planted_skip"}, "o_proj.weight differs between training and rollout"),
    "stale-derived-weight": ({"plugin": "planted_stale"}, "W_UV is a copy from"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(workshop, baseline, fault):
    planted, words = FAULTS[fault]
    assert words in auto(workshop.train(fault, **planted), baseline)


def test_a_device_that_flips_bits_is_named(tmp_path, workshop, baseline):
    """bin/probe stress over three devices of the Ray of the runs, one of which multiplies wrongly."""
    import planted_flip

    from atlasrl.precision import fleet, stress

    run = RunDir(shutil.copytree(baseline.path, tmp_path / "run"))
    reports = fleet.stress(size=64, rounds=2, task=planted_flip.work)
    (run.path / "stress.json").write_text(json.dumps(stress.as_json(reports, stress.judge(reports))))
    assert "device 1: computes" in auto(run, baseline)


@pytest.mark.parametrize("seed", [8, 9])
def test_a_clean_seed_is_not_accused(workshop, baseline, seed):
    assert auto(workshop.train(f"seed-{seed}", seed=seed), baseline) == ""
