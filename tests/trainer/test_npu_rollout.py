"""Fixes of the NPU's rollout on the real files of verl and vllm-ascend; what these import is stood in for."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from atlasrl import stacks

pytestmark = pytest.mark.verl

HERE = Path(__file__).parent

SYNC = """
import asyncio, importlib.metadata
from types import SimpleNamespace

import torch
from stand_ins import stand_in

stand_in("vllm", "msgspec", "zmq", "uvicorn", "fastapi")
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.11.0" if name == "vllm" else version(name)


class LatentAttention(torch.nn.Module):
    # As vllm-ascend: W_UV is a contiguous copy, made when vLLM asks for it.
    def __init__(self):
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(2, 3, bias=False)
        self.process_weights_after_loading(torch.float32)

    def process_weights_after_loading(self, act_dtype):
        self.W_UV = self.kv_b_proj.weight.detach().T.contiguous()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = LatentAttention()

    def load_weights(self, weights):
        self.load_state_dict(dict(weights))


def process_weights_after_loading(model, model_config, device):
    for module in model.modules():
        if hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading(model_config.dtype)


import vllm.model_executor.model_loader.utils as loader
loader.process_weights_after_loading = process_weights_after_loading

from verl.workers.rollout.vllm_rollout.vllm_rollout import vLLMAsyncRollout

from atlasrl.trainer import npu_patches, patches

model, rollout = Model(), object.__new__(vLLMAsyncRollout)
settings = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
runner = SimpleNamespace(model=model, vllm_config=settings)
rollout.inference_engine = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))


def sync(value):
    weights = iter([("model.kv_b_proj.weight", torch.full((3, 2), value))])
    asyncio.run(rollout.update_weights(weights))
    print(bool((model.model.kv_b_proj.weight == value).all()), bool((model.model.W_UV == value).all()))


sync(7.0)
patches.apply("weights-after-sync")
sync(8.0)
sync(9.0)
print([outcome.state for outcome in patches.outcomes()])
"""

ROTARY = """
import importlib.metadata, importlib.util, sys
from types import SimpleNamespace

import torch
from stand_ins import stand_in

stand_in("vllm", "torch_npu", "vllm_ascend")
import vllm_ascend.attention
import vllm_ascend.attention.utils as utils
utils.split_decodes_and_prefills = lambda *args, **options: (2, 0, 2, 0)  # two requests, each decodes one token
spec = importlib.util.spec_from_file_location("vllm_ascend.attention.mla_v1", sys.argv[1])
mla = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mla)
version = importlib.metadata.version
importlib.metadata.version = lambda name: sys.argv[2] if name == "vllm-ascend" else version(name)

from atlasrl.trainer import npu_patches, patches

angles = torch.outer(torch.arange(10.0), 10000 ** (-torch.arange(0, 8, 2) / 8))  # [positions, rotary width / 2]
plain = SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], -1))
doubled = torch.cat([angles, angles], -1)
yarn = SimpleNamespace(cos_cached=2 * doubled.cos(), sin_cached=2 * doubled.sin(), **vars(plain))
positions = torch.tensor([3, 7])
batch = dict.fromkeys(
    ("cos", "sin", "attn_mask", "spec_attn_mask", "num_input_tokens", "attn_state", "enable_dbo_across_dp")
) | dict(
    num_reqs=2, num_actual_tokens=2, positions=positions, seq_lens_cpu=positions + 1, slot_mapping=positions,
    query_start_loc=torch.arange(3), query_start_loc_cpu=torch.arange(3), block_table_tensor=torch.zeros(2, 1),
)


def rotated(rotary):
    builder = object.__new__(mla.AscendMLAMetadataBuilder)
    builder.cos_cache = builder.sin_cache = None
    builder.decode_threshold, builder.device, builder.metadata_cls = 1, "cpu", lambda **fields: fields["decode"]
    builder.model_config = SimpleNamespace(dtype=torch.float32, get_head_size=lambda: 8)
    layer = SimpleNamespace(self_attn=SimpleNamespace(rotary_emb=rotary))
    model = SimpleNamespace(model=SimpleNamespace(layers=[layer], start_layer=0))
    found = builder.build(0, SimpleNamespace(**batch), model)
    return found.cos.squeeze(), found.sin.squeeze()


def judge(rotary, factor):
    try:
        cos, sin = rotated(rotary)
    except AttributeError as problem:
        print(problem)
        return
    print(torch.equal(cos, factor * doubled.cos()[positions]) and torch.equal(sin, factor * doubled.sin()[positions]))


judge(plain, 1)
judge(yarn, 2)
patches.apply("plain-rotary")
judge(plain, 1)
judge(yarn, 2)
print([outcome.state for outcome in patches.outcomes()])
"""


def said(script: str, *arguments: str) -> list[str]:
    path = os.pathsep.join([str(HERE.parents[1] / "pylib"), str(HERE)])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("ATLASRL_WITHOUT_FIX", None)
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_the_fix_attention_keeps_the_weights_of_before_the_sync_and_with_it_not():
    without, first, second, states = said(SYNC)[-4:]
    assert without == "True False"
    assert (first, second) == ("True True", "True True")
    assert states == "['applied']"


@pytest.fixture(scope="module", params=["a2-0.7.0", "a2-0.7.1"])
def vllm_ascend(request, tmp_path_factory):
    """The version of a stack, and attention/mla_v1.py of its wheel, which is for aarch64."""
    version = stacks.load(request.param).version("vllm-ascend")
    folder = tmp_path_factory.mktemp("wheel")
    wheel = ["--only-binary=:all:", "--platform=manylinux_2_24_aarch64", "--python-version=3.10", "--abi=cp310"]
    options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(folder), *wheel]
    command = [sys.executable, "-m", "pip", "download", *options, f"vllm-ascend=={version}"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        pytest.skip(f"no vllm-ascend {version} here: {asked.stderr.strip().splitlines()[-1]}")
    (file,) = folder.glob("*.whl")
    return version, zipfile.ZipFile(file).extract("vllm_ascend/attention/mla_v1.py", folder)


def test_without_the_fix_a_plain_rotary_embedding_has_no_tables_and_with_it_the_right_ones(vllm_ascend):
    version, file = vllm_ascend
    plain, yarn, mended, still, states = said(ROTARY, file, version)
    assert "no attribute 'cos_cached'" in plain
    assert (yarn, mended, still) == ("True", "True", "True")
    assert states == "['applied']"
