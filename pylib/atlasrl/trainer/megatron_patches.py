"""Faults of the Megatron stack, mended: silent errors that a CPU, a GPU and an NPU share.

Each was found or confirmed by the gradient self-test (`bin/selftest --without-fix ID` shows it) and is written up with
numbers in docs/upstream.md. What a CPU merely lacks is in `trainer/cpu/megatron_device.py` and `megatron_bridge.py`.
"""

from __future__ import annotations

import inspect

from atlasrl.errors import Fault
from atlasrl.trainer.patches import patch

PATCHES = (
    "ddp-optimizer-flag",
    "mla-rotary-key",
    "param-group-order",
    "router-groups",
    "mbridge-arguments",
    "mbridge-device",
    "load-without-transformer-engine",
)


@patch(
    id="ddp-optimizer-flag",
    reason="use_distributed_optimizer=False does not reach DDP through mbridge: DDP reduce-scatters, the plain "
    "optimizer steps on gradients reduced only in the worker's own shard, and the replicas diverge without an error",
    upstream="verl PR #5775 (3d274f6a7), released in 0.8.0",
    package="verl",
    versions=">=0.7.0,<0.8",
    target="verl.utils.megatron_utils:make_megatron_module",
    expects="ddp_config=override_ddp_config,",
)
def same_flag_for_ddp(original):
    def make_megatron_module(wrap_config, *args, override_ddp_config=None, **kwargs):
        flag = {"use_distributed_optimizer": wrap_config.use_distributed_optimizer}
        return original(wrap_config, *args, override_ddp_config={**flag, **(override_ddp_config or {})}, **kwargs)

    return make_megatron_module


@patch(
    id="mla-rotary-key",
    reason="with tensor parallelism every rank loses the other ranks' gradient of the rotary key that all heads share: "
    "a column-parallel kv_down_proj is gathered with a backward that only splits",
    upstream="NVIDIA/Megatron-LM issue #1699; Transformer Engine layers from 0.14 are not affected",
    package="megatron-core",
    versions=">=0.12,<0.14",
    target="megatron.core.transformer.multi_latent_attention:MLASelfAttention.__init__",
    expects="submodules.linear_kv_down_proj",
)
def whole_rotary_key_gradient(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        full_width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if self.config.tensor_model_parallel_size > 1 and self.config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_gathered_over_sequence(full_width))

    return __init__


def _gathered_over_sequence(full_width: int):
    """A forward hook: a projection sharded over its columns [s, b, width / TP] becomes whole on each rank's part of the
    sequence [s / TP, b, width].

    For that shape the attention gathers the rotary key along the sequence, and the backward of that gather sums over
    the ranks (reduce-scatter).
    """

    def hook(module, inputs, output):
        from megatron.core.tensor_parallel.mappings import (
            gather_from_tensor_model_parallel_region,
            scatter_to_sequence_parallel_region,
        )

        projected, bias = output
        if projected.size(-1) == full_width:
            return output
        return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(projected)), bias

    return hook


@patch(
    id="param-group-order",
    reason="resume with pipeline parallelism: parameter groups are ordered by first appearance on each stage but "
    "restored from rank 0's list by index, so on later stages weight decay moves from the matrices to the norms",
    upstream="megatron-core 0.12; groups are matched by their options when loading from 0.13.1 on",
    package="megatron-core",
    versions=">=0.12,<0.13.1",
    target="megatron.core.optimizer:_get_param_groups",
    expects="params_map",
)
def same_order_on_every_stage(original):
    def _get_param_groups(*args, **kwargs):
        return sorted(original(*args, **kwargs), key=_group_rank)

    return _get_param_groups


def _group_rank(group: dict) -> tuple:
    """The order of the first pipeline stage, whose first parameter is the embedding: matrices before norms."""
    return group["is_expert_parallel"], -group["wd_mult"], -group["lr_mult"], group["is_decoupled_lr"]


@patch(
    id="router-groups",
    reason="mbridge drops n_group and topk_group: training routes over all experts while inference routes within the "
    "best groups (DeepSeek-V3: 4 of 8), so the trained policy is not the policy that generated the answers",
    upstream="not reported; mbridge/models/deepseek_v3.py still lacks moe_router_num_groups on main (1cd9ee9)",
    package="mbridge",
    versions=">=0.13",
    target="mbridge.models.deepseek_v3:DeepseekV3Bridge._build_config",
    expects="moe_router_topk_scaling_factor",
)
def router_groups_of_the_checkpoint(original):
    if "moe_router_num_groups" in inspect.getsource(original):
        return original

    def _build_config(self):
        groups = getattr(self.hf_config, "n_group", None) or 1
        if groups > 1:
            chosen, experts = self.hf_config.topk_group, self.hf_config.num_experts_per_tok
            if experts != 2 * chosen:
                raise Fault(
                    f"config.json: num_experts_per_tok {experts} is not twice topk_group {chosen}; transformers and "
                    f"vLLM rank a group by its best 2 experts, megatron-core by its best {experts // chosen}: they "
                    "would choose other experts"
                )
            self.extra_args.setdefault("moe_router_num_groups", groups)
            self.extra_args.setdefault("moe_router_group_topk", chosen)
        return original(self)

    return _build_config


_ARGUMENTS = (
    "verl 0.7 passes arguments that the mbridge releases on PyPI do not know: TypeError at start and at every save"
)


@patch(
    id="mbridge-arguments",
    reason=_ARGUMENTS,
    upstream="verl PR #4386 needs mbridge from git (5691f71 or later); PyPI ends at 0.15.1",
    package="mbridge",
    versions=">=0.13,<0.16",
    target="mbridge.core.auto_bridge:AutoBridge.from_config",
    expects="_MODEL_REGISTRY[model_type](hf_config",
)
def from_config_with_dtype(original):
    if "kwargs" in inspect.signature(original.__func__).parameters:
        return original

    def from_config(cls, hf_config, dtype=None):
        from mbridge.core.bridge import _MODEL_REGISTRY

        if dtype is None or hf_config.model_type not in _MODEL_REGISTRY:
            return original.__func__(cls, hf_config)
        return _MODEL_REGISTRY[hf_config.model_type](hf_config, dtype=dtype)

    return classmethod(from_config)


@patch(
    id="mbridge-arguments",
    reason=_ARGUMENTS,
    upstream="verl PR #4386 needs mbridge from git (5691f71 or later); PyPI ends at 0.15.1",
    package="mbridge",
    versions=">=0.13,<0.16",
    target="mbridge.core.bridge:Bridge.save_weights",
    expects="memory_efficient",
)
def save_weights_from_rank_0(original):
    if "distributed_filesystem" in inspect.signature(original).parameters:
        return original

    def save_weights(self, models, weights_path, memory_efficient=False, distributed_filesystem=False):
        """Rank 0 writes everything, as mbridge 0.13 does; `distributed_filesystem` asked every rank to write a part."""
        return original(self, models, weights_path, memory_efficient=memory_efficient)

    return save_weights


@patch(
    id="mbridge-device",
    reason="weights are read to 'cuda', which no NPU is; edited to 'npu', all ranks of a node fill its first device",
    upstream="mbridge PR #52 (2334188), in git after 0.15.1",
    package="mbridge",
    versions=">=0.13",
    target="mbridge.models.ext.deepseek_v3.dequant_fp8_safetensor_io:DequantFP8SafeTensorIO.load_some_hf_weight",
    expects="safe_open(",
)
def read_to_own_device(original):
    if 'device="cuda"' not in inspect.getsource(original):
        return original
    names = original.__globals__
    opened = names["safe_open"]
    names["safe_open"] = lambda file, framework, device: opened(file, framework=framework, device=_own_device())
    return original


def _own_device() -> str:
    """This process's device, by number: a name alone may be the first of the node."""
    import torch

    for name in ("npu", "cuda"):
        accelerator = getattr(torch, name, None)
        if accelerator is not None and accelerator.is_available():
            return f"{name}:{accelerator.current_device()}"
    return "cpu"


@patch(
    id="load-without-transformer-engine",
    reason="every resume imports transformer_engine, only to allow-list its optimizer: no resume on an NPU or a CPU",
    upstream="verl PR #4938 (c0975d822), in 0.7.1",
    package="verl",
    versions=">=0.7.0,<0.7.1",
    target="verl.utils.checkpoint.megatron_checkpoint_manager:MegatronCheckpointManager.load_checkpoint",
    expects="        import transformer_engine\n",
)
def optional_transformer_engine(original):
    import functools
    import importlib.util
    import sys
    from types import ModuleType, SimpleNamespace

    @functools.wraps(original)
    def load_checkpoint(self, *args, **kwargs):
        if importlib.util.find_spec("transformer_engine") is not None:
            return original(self, *args, **kwargs)
        import torch

        stand_in = ModuleType("transformer_engine")
        stand_in.pytorch = SimpleNamespace(
            optimizers=SimpleNamespace(fused_adam=SimpleNamespace(FusedAdam=torch.optim.AdamW))
        )
        sys.modules["transformer_engine"] = stand_in
        try:
            return original(self, *args, **kwargs)
        finally:
            del sys.modules["transformer_engine"]

    return load_checkpoint
