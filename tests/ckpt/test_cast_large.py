"""A generated 4 GB checkpoint: `bin/ckpt cast` killed twenty times, resumed, and held against the reference formula."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_checkpoints import QUANTISED, random_codes, write_checkpoint

from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.index import INDEX_NAME
from ckpt_tools.plan import plan_cast
from ckpt_tools.verify import verify

ROOT = Path(__file__).resolve().parents[2]
GIGABYTES = float(os.environ.get("CKPT_LARGE_GIGABYTES", 4))
SHAPES = [(7168, 2048), (576, 7168), (1536, 7168), (18432, 1000)]
KILLS = 20


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_killed_twenty_times_a_large_cast_is_the_reference_formula_bit_for_bit(tmp_path):
    if shutil.disk_usage(tmp_path).free < 4e9 * GIGABYTES:
        pytest.skip(f"{4 * GIGABYTES:.0f} GB of disk are needed")
    source, target = tmp_path / "fp8", tmp_path / "bf16"
    write_large(source)
    plan, dice = plan_cast(read_checkpoint(source), target), random.Random(7)
    for point in sorted(dice.uniform(0, 0.95 * plan.size) for _ in range(KILLS)):
        assert run_until(source, target, point) == -signal.SIGKILL, f"ended before {point:.0f} of {plan.size} bytes"
        assert not (target / INDEX_NAME).exists(), "it looks finished and is not"
    assert run_until(source, target, float("inf")) == 0
    assert verify(target).errors == []
    for job in plan.jobs:
        with (target / job.file).open("rb") as file:
            assert file.read(len(job.header)) == job.header
    assert_formula(source, target)


def write_large(folder: Path) -> None:
    """Shards of 12 matrices each; without an index, files that are not numbered are all of a checkpoint."""
    generator = np.random.default_rng(0)
    shards, size = 0, 0
    while size < GIGABYTES * 1e9:
        tensors = {}
        for number, shape in enumerate(SHAPES * 3):
            name = f"layers.{shards}.{number}.weight"
            scales = generator.uniform(1e-5, 1e-2, (-(-shape[0] // 128), -(-shape[1] // 128))).astype("<f4")
            tensors[name] = ("F8_E4M3", random_codes(generator, shape))
            tensors[f"{name}_scale_inv"] = ("F32", scales)
            size += shape[0] * shape[1]
        write_checkpoint(folder, [tensors], {"quantization_config": QUANTISED})
        (folder / "model-00001-of-000001.safetensors").rename(folder / f"part{shards:03d}.safetensors")
        shards += 1
    (folder / INDEX_NAME).unlink()


def run_until(source: Path, target: Path, point: float) -> int:
    """Run the command, and kill it with -9 once so many bytes lie in the target; returns its exit code."""
    command = [ROOT / "bin" / "ckpt", "cast", source, target, "--workers", "2"]
    environment = {**os.environ, "ATLASRL_VENV": sys.prefix}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while True:
        try:
            return process.wait(0.005)
        except subprocess.TimeoutExpired:
            if bytes_in(target) > point:
                process.kill()


def bytes_in(folder: Path) -> int:
    """Bytes of finished and of begun shards; files come and go meanwhile."""
    if not folder.exists():
        return 0
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                continue
    return total


def assert_formula(source: Path, target: Path) -> None:
    """Every tensor of the target is bfloat16(float32(weight) * scale of its block), computed by torch."""
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as before, safe_open(target / path.name, "pt") as after:
            for name in sorted(after.keys()):
                weight, scale = before.get_tensor(name), before.get_tensor(f"{name}_scale_inv")
                wide = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
                expected = (weight.float() * wide[:, : weight.shape[1]]).to(torch.bfloat16)
                assert torch.equal(after.get_tensor(name).view(torch.int16), expected.view(torch.int16)), name
