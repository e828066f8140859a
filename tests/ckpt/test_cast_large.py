"""A generated 4 GB checkpoint, cast and compared bit by bit with the reference formula; run by hand or nightly."""

import os
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_checkpoints import QUANTISED, random_codes, write_checkpoint

from ckpt_tools.cast import cast

GIGABYTES = float(os.environ.get("CKPT_LARGE_GIGABYTES", 4))
SHAPES = [(7168, 2048), (576, 7168), (1536, 7168), (18432, 1000)]


@pytest.mark.nightly
def test_a_large_checkpoint_is_the_reference_formula_bit_for_bit(tmp_path):
    if shutil.disk_usage(tmp_path).free < 4e9 * GIGABYTES:
        pytest.skip(f"{4 * GIGABYTES:.0f} GB of disk are needed")
    generator = np.random.default_rng(0)
    shards, size = [], 0.0
    while size < GIGABYTES * 1e9:
        tensors = {}
        for number, shape in enumerate(SHAPES * 3):
            name = f"layers.{len(shards)}.{number}.weight"
            scales = generator.uniform(1e-5, 1e-2, (-(-shape[0] // 128), -(-shape[1] // 128))).astype("<f4")
            tensors[name] = ("F8_E4M3", random_codes(generator, shape))
            tensors[f"{name}_scale_inv"] = ("F32", scales)
            size += shape[0] * shape[1]
        write_checkpoint(tmp_path / "part", [tensors], {"quantization_config": QUANTISED})
        shards.append(tmp_path / "part" / "model-00001-of-000001.safetensors")
        place(shards, tmp_path / "fp8")
    cast(tmp_path / "fp8", tmp_path / "bf16", workers=2)
    for path in sorted((tmp_path / "fp8").glob("*.safetensors")):
        with safe_open(path, "pt") as before, safe_open(tmp_path / "bf16" / path.name, "pt") as after:
            for name in sorted(after.keys()):
                weight, scale = before.get_tensor(name), before.get_tensor(f"{name}_scale_inv")
                wide = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
                expected = (weight.float() * wide[:, : weight.shape[1]]).to(torch.bfloat16)
                assert torch.equal(after.get_tensor(name).view(torch.int16), expected.view(torch.int16)), name


def place(shards, folder) -> None:
    """Move the newest part into the checkpoint; without an index, unnumbered names are all of it."""
    folder.mkdir(exist_ok=True)
    shards[-1].rename(folder / f"part{len(shards):03d}.safetensors")
    shutil.copy(shards[-1].parent / "config.json", folder)
