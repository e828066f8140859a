"""Rules about silent errors of the update: gradients, optimizer, routers. See docs/upstream.md for the numbers."""

from __future__ import annotations

from atlasrl.lint.case import ACTOR, MEGATRON, OPTIMIZER, TRANSFORMER, Case
from atlasrl.lint.rule import rule

FIX = "leave the fix on: take {} out of ATLASRL_WITHOUT_FIX, or use a stack whose version the fix is for"


@rule(
    "rotary-key-gradient",
    "error",
    reason="every tensor rank loses the other ranks' gradient of the shared rotary key (up to 28 % off), silently",
    source="NVIDIA/Megatron-LM issue #1699; Megatron-core 0.12 and 0.13, MindSpeed's copy of it",
    remedy=FIX.format("mla-rotary-key"),
)
def rotary_key_gradient(case: Case):
    tensor = case.recipe.parallel.tensor
    affected = case.latent and case.megatron and tensor > 1 and case.within("megatron-core", ">=0.12,<0.14")
    if affected and not case.mended("mla-rotary-key"):
        yield f"latent attention with parallel.tensor {tensor} on Megatron-core {case.stack.version('megatron-core')}"


@rule(
    "optimizer-flag",
    "error",
    reason="DDP reduce-scatters while the optimizer steps on whole gradients: the replicas drift apart, silently",
    source="verl PR #5775 (3d274f6a7), released in 0.8.0",
    remedy="set parallel.distributed_optimizer, which sets both flags, and nothing under `verl:`",
)
def optimizer_flag(case: Case):
    wanted = case.setting(f"{MEGATRON}.use_distributed_optimizer", True)
    passed = case.setting(f"{MEGATRON}.override_ddp_config.use_distributed_optimizer", True)
    if case.megatron and bool(wanted) != bool(passed):
        yield f"use_distributed_optimizer is {wanted} for the optimizer and {passed} for DDP"


@rule(
    "pipeline-resume",
    "error",
    reason="after a resume, weight decay moves from matrices to norms on every stage but the first, silently",
    source="Megatron-core 0.12 optimizer/__init__.py _get_param_groups; groups are matched on load from 0.13.1 on",
    remedy=FIX.format("param-group-order"),
)
def pipeline_resume(case: Case):
    if (
        case.megatron
        and case.recipe.parallel.pipeline > 1
        and case.within("megatron-core", ">=0.12,<0.13.1")
        and not case.mended("param-group-order")
    ):
        yield f"parallel.pipeline {case.recipe.parallel.pipeline} on {case.stack.version('megatron-core')}"


@rule(
    "router-groups",
    "error",
    reason="training routes over all experts, generation within the best groups: the trained policy is not the one "
    "that answered",
    source="mbridge 0.13 to main, models/deepseek_v3.py: no moe_router_num_groups",
    remedy=FIX.format("router-groups"),
)
def router_groups(case: Case):
    grouped = case.architecture is not None and case.architecture.family == "deepseek_v3" and case.architecture.experts
    if case.megatron and grouped and case.stack is not None and not case.mended("router-groups"):
        yield "a DeepSeek mixture through mbridge without its expert groups"


@rule(
    "router-bias",
    "warning",
    reason="Megatron moves the router biases each step and FSDP2 never does: the curves are not comparable",
    source="mbridge 0.13.1 models/deepseek_v3.py (0.001); Megatron-core finalize_model_grads.py",
    remedy="leave moe_router_bias_update_rate at 0",
)
def router_bias(case: Case):
    if case.megatron and (rate := case.setting(f"{TRANSFORMER}.moe_router_bias_update_rate", 0.0)):
        yield f"moe_router_bias_update_rate is {rate}"


@rule(
    "softmax-scale",
    "error",
    reason="MindSpeed's attention divides by the wrong head width: 22 % off for Moonlight, 1 to 8 % for DeepSeek-V3",
    source="MindSpeed !2976 (a25e413e), missing in tag v2.2.0_core_r0.12.1 and in verl's documented pin f2b0977e",
    remedy="use a MindSpeed from a25e413e on, or the tag v2.3.0_core_r0.12.1; its version number tells nothing",
)
def softmax_scale(case: Case):
    if case.on_npu and case.latent and not case.can("mla_softmax_scale"):
        yield "latent attention with a MindSpeed that ignores its softmax scale"


@rule(
    "rope-fusion",
    "error",
    reason="Megatron asserts that yarn rotary embeddings of latent attention are not fused",
    source="Megatron-core 0.12.1 multi_latent_attention.py",
    remedy="set apply_rope_fusion to false",
)
def rope_fusion(case: Case):
    if case.megatron and case.latent and case.setting(f"{TRANSFORMER}.apply_rope_fusion"):
        yield "apply_rope_fusion with latent attention"


@rule(
    "flash-attention",
    "warning",
    reason="MindSpeed replaces the attention only when asked; without it the plain one needs s x s memory",
    source="verl v0.7.0 docs/ascend_tutorial; recipe/r1_ascend/run_deepseekv3_671b_grpo_megatron_npu.sh",
    remedy="take use_flash_attn out of `verl:`; the plan turns it on",
)
def flash_attention(case: Case):
    if case.on_npu and case.megatron and not case.setting(f"{TRANSFORMER}.use_flash_attn"):
        yield "use_flash_attn is not set"


@rule(
    "cuda-only",
    "error",
    reason="there is no such kernel on an NPU",
    source="verl v0.7.0 docs/ascend_tutorial (flash_attn, liger-kernel); examples/grpo_trainer (deepep is CUDA's)",
    remedy="take it out; on NPUs use moe_token_dispatcher_type alltoall",
)
def cuda_only(case: Case):
    if not case.on_npu:
        return
    switches = {
        f"{TRANSFORMER}.moe_enable_deepep": True,
        f"{TRANSFORMER}.moe_token_dispatcher_type": "flex",
        f"{TRANSFORMER}.gradient_accumulation_fusion": True,
        "actor_rollout_ref.model.use_fused_kernels": True,
        "actor_rollout_ref.model.use_liger": True,
        f"{ACTOR}.use_torch_compile": True,
    }
    for key, bad in switches.items():
        if case.setting(key) == bad:
            yield f"{key} is {bad}"


@rule(
    "two-optimizer-homes",
    "error",
    reason="MindSpeed's swap_optimizer and Megatron's host optimizer both move the same state",
    source="MindSpeed docs/features/swap-optimizer.md; verl v0.7.0 recipe/r1_ascend",
    remedy="use one: parallel.optimizer_on_host, or swap_optimizer",
)
def two_optimizer_homes(case: Case):
    if case.setting(f"{TRANSFORMER}.swap_optimizer") and case.setting(f"{OPTIMIZER}.optimizer_cpu_offload"):
        yield "swap_optimizer with optimizer_cpu_offload"
