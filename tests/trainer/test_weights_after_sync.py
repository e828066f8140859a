"""Latent attention sees each weight sync, on verl 0.7.0's own rollout with a stand-in for vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.verl

SCRIPT = """
import asyncio, importlib.metadata, sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch


class AnyModule(ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {"__init__": lambda self, *args, **options: None}))
        return getattr(self, name)


class Vllm:
    # Every module of vLLM and of what it brings, with a class of any name in it.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"vllm", "msgspec", "zmq", "uvicorn", "fastapi"}:
            return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return AnyModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Vllm())
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

from atlasrl.trainer import patches, verl_patches

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


def test_without_the_fix_attention_keeps_the_weights_of_before_the_sync_and_with_it_not():
    path = str(Path(__file__).parents[2] / "pylib")
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("ATLASRL_WITHOUT_FIX", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    without, first, second, states = done.stdout.splitlines()[-4:]
    assert without == "True False"
    assert (first, second) == ("True True", "True True")
    assert states == "['applied']"
