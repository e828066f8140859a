"""Rules about the split of the model and the batches. Legality itself is atlasrl.legality; here it gets its words."""

from __future__ import annotations

from atlasrl import legality
from atlasrl.lint.case import TRANSFORMER, Case
from atlasrl.lint.rule import rule


@rule(
    "training-split",
    "error",
    reason="Megatron stops at an assertion after the cluster is up",
    source="Megatron-core 0.12.1 parallel_state.py, transformer_config.py, transformer_block.py",
    remedy="`bin/memory search RECIPE` lists the splits that are legal and fit",
)
def training_split(case: Case):
    if case.split is not None:
        longest = case.recipe.data.max_prompt_tokens + case.recipe.data.max_response_tokens
        yield from legality.broken_rules(case.architecture, case.split, case.devices, longest)


@rule(
    "rollout-split",
    "error",
    reason="the engines do not start, or hold experts in pieces",
    source="verl v0.7.0 vllm_async_server.py, RolloutConfig.__post_init__",
    remedy="change rollout.tensor and rollout.expert",
)
def rollout_split(case: Case):
    if case.architecture is not None and case.recipe.rollout.engine == "vllm":
        split = legality.RolloutSplit(case.recipe.rollout.tensor, case.recipe.rollout.expert)
        yield from legality.broken_rollout_rules(case.architecture, split, case.world, case.devices)


@rule(
    "batch-split",
    "error",
    reason="verl stops at an assertion, or ranks get unequal numbers of answers",
    source="verl v0.7.0 ray_trainer.py _validate_config, workers/actor",
    remedy="make batch sizes multiples of the data-parallel size",
)
def batch_split(case: Case):
    data = case.split.data if case.split else case.world if case.recipe.backend == "fsdp2" else 0
    if data:
        yield from legality.broken_batch_rules(case.recipe, data)


@rule(
    "context-latent",
    "warning",
    reason="context parallelism with latent attention is validated by nobody at this size",
    source="verl v0.7.0 examples/grpo_trainer/run_deepseek671b_math_megatron_96gb.sh (CP 1)",
    remedy="set parallel.context: 1",
)
def context_latent(case: Case):
    if case.latent and case.recipe.parallel.context > 1:
        yield f"parallel.context {case.recipe.parallel.context} with latent attention"


@rule(
    "unsharded-experts",
    "warning",
    reason="with one expert replica the distributed optimizer shards no expert state: 12 bytes a parameter on each "
    "rank (31.5 GiB for four layers of DeepSeek-V3 at EP 16)",
    source="Megatron-core 0.12.1 distrib_optimizer.py; expert data-parallel size = W / (ETP x EP x PP)",
    remedy="set parallel.offload: true or parallel.optimizer_on_host: 1.0, or a smaller parallel.expert",
)
def unsharded_experts(case: Case):
    p = case.recipe.parallel
    if case.split is None or case.architecture.experts is None or case.on_npu is False:
        return
    if case.world > 8 and case.split.expert_data == 1 and not (p.offload or p.optimizer_on_host):
        yield f"{case.world} devices / (EP {p.expert} x ETP {p.expert_tensor} x PP {p.pipeline}) = 1 expert replica"


@rule(
    "stage-accounting",
    "error",
    reason="Megatron refuses layers of the first or last stage together with embedding or loss accounting",
    source="Megatron-core 0.12.1 transformer_config.py __post_init__",
    remedy="use either parallel.first_stage_layers and last_stage_layers or the account_for_* settings",
)
def stage_accounting(case: Case):
    accounts = [f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss")]
    p = case.recipe.parallel
    if p.first_stage_layers or p.last_stage_layers:
        for name in accounts:
            if case.setting(f"{TRANSFORMER}.{name}"):
                yield f"{name} with parallel.first_stage_layers {p.first_stage_layers}, last {p.last_stage_layers}"


@rule(
    "draft-layers",
    "error",
    reason="mbridge builds the draft layer (MTP) for 61 layers only, and stops at an assertion on a model cut shorter",
    source="mbridge 0.13.1 models/deepseek_v3.py _convert_mtp_param; mbridge issue #119",
    remedy="set num_nextn_predict_layers: 0 in config.json and drop the draft layer's tensors: bin/ckpt does both",
)
def draft_layers(case: Case):
    drafts, layers = case.config.get("num_nextn_predict_layers") or 0, case.config.get("num_hidden_layers")
    if case.megatron and drafts and layers != 61:
        yield f"{case.recipe.model.cast_path}/config.json has {drafts} draft layer(s) and {layers} layers"
