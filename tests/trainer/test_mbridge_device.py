"""mbridge reads weights to the device of the worker, on its real reader of DeepSeek checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.verl

SCRIPT = """
import importlib.util, sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file

from atlasrl.trainer import megatron_patches, patches

# The reader itself is the installed one; what it imports from Megatron and triton is not needed to open a file.
package = Path(importlib.util.find_spec("mbridge").origin).parent
for name in ("mbridge", "mbridge.core", "mbridge.models", "mbridge.models.ext", "mbridge.models.ext.deepseek_v3"):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(package.joinpath(*name.split(".")[1:]))]


class SafeTensorIO:
    def __init__(self, folder):
        self.hf_dir, self.index = folder, {"w": "model.safetensors"}


sys.modules["mbridge.core.safetensor_io"] = ModuleType("io")
sys.modules["mbridge.core.safetensor_io"].SafeTensorIO = SafeTensorIO
sys.modules["mbridge.models.ext.deepseek_v3.kernel"] = ModuleType("kernel")
sys.modules["mbridge.models.ext.deepseek_v3.kernel"].weight_dequant = None

folder = sys.argv[1]
save_file({"w": torch.arange(3.0)}, f"{folder}/model.safetensors")
patches.apply("mbridge-device")
from mbridge.models.ext.deepseek_v3.dequant_fp8_safetensor_io import DequantFP8SafeTensorIO

print([(o.id, o.state) for o in patches.outcomes()])
for _ in range(2):
    try:
        print(DequantFP8SafeTensorIO(folder).load_some_hf_weight(["w"])["w"].tolist())
    except Exception as problem:
        print(f"{type(problem).__name__}: {problem}")
    if not torch.cuda.is_available():  # a second round as an NPU worker sees it: the third device of its node
        torch.npu = ModuleType("npu")
        torch.npu.is_available, torch.npu.current_device = (lambda: True), (lambda: 3)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    def say(without: str) -> list[str]:
        path = str(Path(__file__).parents[2] / "pylib")
        environment = {**os.environ, "ATLASRL_WITHOUT_FIX": without, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        folder = tmp_path_factory.mktemp("model")
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return say


def test_without_the_fix_the_reader_asks_for_cuda(said):
    outcome, read, _ = said("mbridge-device")
    assert "switched off" in outcome
    assert "CUDA" in read or "cuda" in read


def test_with_the_fix_it_reads_to_the_device_of_this_process(said):
    outcome, read, on_npu = said("")
    assert "('mbridge-device', 'applied')" in outcome
    assert read == "[0.0, 1.0, 2.0]"
    assert "npu:3" in on_npu or "npu" in on_npu.lower(), on_npu
