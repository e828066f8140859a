"""verl's settings of the Megatron backend (config `ppo_megatron_trainer`). Pure, like `overrides`."""

from __future__ import annotations

from atlasrl.recipe import Parallel, Recipe
from atlasrl.trainer.override import Override

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"++{MEGATRON}.override_transformer_config"


def megatron_overrides(recipe: Recipe, *, world: int) -> list[Override]:
    """Parallel split, optimizer and checkpoint settings of Megatron actors on `world` devices."""
    parallel, on_cpu = recipe.parallel, recipe.device == "cpu"
    settings = [
        Override(f"{ACTOR}.strategy", "megatron", "recipe: backend"),
        Override("critic.strategy", "megatron", "unused, but verl checks it"),
        Override(f"{ACTOR}.optim.clip_grad", recipe.optimizer.clip_grad, "recipe: optimizer.clip_grad"),
        Override(f"{MEGATRON}.use_mbridge", True, "Hugging Face weights are read and written directly"),
        Override(f"{MEGATRON}.dtype", recipe.model.compute_dtype, "recipe: model.compute_dtype"),
        Override(f"{MEGATRON}.tensor_model_parallel_size", parallel.tensor, "recipe: parallel.tensor"),
        Override(f"{MEGATRON}.pipeline_model_parallel_size", parallel.pipeline, "recipe: parallel.pipeline"),
        Override(f"{MEGATRON}.context_parallel_size", parallel.context, "recipe: parallel.context"),
        Override(f"{MEGATRON}.expert_model_parallel_size", parallel.expert, "recipe: parallel.expert"),
        Override(f"{MEGATRON}.expert_tensor_parallel_size", parallel.expert_tensor, "recipe: parallel.expert_tensor"),
        Override(f"{MEGATRON}.sequence_parallel", parallel.tensor > 1, "MoE training with tensor parallelism needs it"),
        Override(
            f"{MEGATRON}.use_distributed_optimizer",
            parallel.distributed_optimizer,
            "recipe: parallel.distributed_optimizer",
        ),
        # verl 0.7.0 drops this flag on its way to DDP; both must agree, or replicas diverge (verl PR #5775).
        Override(
            f"++{MEGATRON}.override_ddp_config.use_distributed_optimizer",
            parallel.distributed_optimizer,
            "verl 0.7.0 does not pass the flag to DDP (verl PR #5775)",
        ),
        # mbridge moves the router biases by 0.001 every step; FSDP2 never does. The same recipe trains the same model.
        Override(
            f"{TRANSFORMER}.moe_router_bias_update_rate", 0.0, "backends agree: FSDP2 does not move router biases"
        ),
        Override(f"{ACTOR}.checkpoint.save_contents", ["model", "optimizer", "extra", "hf_model"], "resume and export"),
    ]
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        # verl's offload frees the device's memory after a copy to the host; on a CPU that copy is the same memory
        settings.append(Override(f"{MEGATRON}.{name}", parallel.offload and not on_cpu, "recipe: parallel.offload"))
    if recipe.device == "npu":
        settings.append(
            Override(f"{TRANSFORMER}.use_flash_attn", True, "MindSpeed replaces the plain s x s attention when asked")
        )
    settings += _recompute(parallel)
    if parallel.virtual_pipeline > 1:
        settings.append(
            Override(
                f"{MEGATRON}.virtual_pipeline_model_parallel_size",
                parallel.virtual_pipeline,
                "recipe: parallel.virtual_pipeline",
            )
        )
    if parallel.optimizer_on_host and not on_cpu:  # on a CPU the optimizer is on the host anyway
        optimizer = f"++{ACTOR}.optim.override_optimizer_config"
        settings += [
            Override(f"{optimizer}.optimizer_cpu_offload", True, "recipe: parallel.optimizer_on_host"),
            Override(
                f"{optimizer}.optimizer_offload_fraction",
                parallel.optimizer_on_host,
                "recipe: parallel.optimizer_on_host",
            ),
            Override(f"{optimizer}.use_precision_aware_optimizer", True, "the host optimizer keeps the master weights"),
            Override(f"{optimizer}.overlap_cpu_optimizer_d2h_h2d", True, "overlaps copies with the host's steps"),
        ]
    for stage, layers in (("first", parallel.first_stage_layers), ("last", parallel.last_stage_layers)):
        if layers is not None:
            settings.append(
                Override(
                    f"{TRANSFORMER}.num_layers_in_{stage}_pipeline_stage",
                    layers,
                    f"recipe: parallel.{stage}_stage_layers",
                )
            )
    if on_cpu:
        settings += [
            Override(f"{MEGATRON}.use_remove_padding", False, "packing needs a fused attention kernel"),
            Override(
                f"++{ACTOR}.optim.override_optimizer_config.bf16",
                recipe.model.compute_dtype == "bfloat16",
                "the optimizer must know the parameters' type",
            ),
        ]
    return settings


def _recompute(parallel: Parallel) -> list[Override]:
    if parallel.recompute == "none":
        return []
    settings = [Override(f"{TRANSFORMER}.recompute_granularity", parallel.recompute, "recipe: parallel.recompute")]
    if parallel.recompute == "selective":
        modules = list(parallel.recompute_modules) or ["core_attn"]
        return [
            *settings,
            Override(f"{TRANSFORMER}.recompute_modules", modules, "recipe: parallel.recompute_modules"),
        ]
    return [
        *settings,
        Override(f"{TRANSFORMER}.recompute_method", parallel.recompute_method, "recipe: parallel.recompute_method"),
        Override(f"{TRANSFORMER}.recompute_num_layers", parallel.recompute_layers, "recipe: parallel.recompute_layers"),
    ]
