"""Rules about the rollout: weights that reach the engine, sleep, graphs, prefill."""

from __future__ import annotations

from atlasrl.lint.case import ROLLOUT, TRANSFORMER, VLLM, Case
from atlasrl.lint.rule import rule

TORCHAIR = "torchair_graph_config"
ADDITIONAL = f"`++{VLLM}.additional_config"
CONFIG = "vllm-ascend v0.10.0rc1 vllm_ascend/ascend_config.py"


@rule(
    "stale-latent-weights",
    "error",
    reason="vllm-ascend copies W_UV and W_UK_T once, after loading: with load_format dummy they stay random and the "
    "answers are gibberish, otherwise they stay those of step 0",
    source="verl PR #4130; vllm-ascend v0.10.0rc1 attention/mla_v1.py process_weights_after_loading",
    remedy="leave the fix weights-after-sync on",
)
def stale_latent_weights(case: Case):
    fresh = case.can("weights_processed_after_sync") or case.mended("weights-after-sync")
    if case.vllm_on_npu and case.latent and not fresh:
        yield f"latent attention, load_format {case.setting(f'{ROLLOUT}.load_format', 'dummy')}"


@rule(
    "rotary-without-yarn",
    "error",
    reason="vllm-ascend reads cos_cached, which only the yarn rotary embedding has: AttributeError at the first prompt",
    source="vllm-ascend v0.10.0rc1 and v0.11.0 attention/mla_v1.py, ops/rotary_embedding.py",
    remedy="leave the fix plain-rotary on, and torchair graphs, which have their own copy of that code, off",
)
def rotary_without_yarn(case: Case):
    name = case.recipe.model.path.name.lower() if case.recipe.model.path else ""
    plain = "moonlight" in name or (case.config and not case.config.get("rope_scaling"))
    mended = case.mended("plain-rotary") and not case.additional(f"{TORCHAIR}.enabled")
    if case.vllm_on_npu and case.latent and plain and not (case.can("mla_rotary_any") or mended):
        yield "latent attention without rope_scaling (Moonlight)"


@rule(
    "sync-rollout",
    "error",
    reason="verl raises: SPMD rollout was removed",
    source="verl PR #4411 (fd893c788); before it, PR #4106 made async the default",
    remedy=f"leave {ROLLOUT}.mode out",
)
def sync_rollout(case: Case):
    if (mode := case.setting(f"{ROLLOUT}.mode", case.can("rollout", "async"))) != case.can("rollout", mode):
        yield f"{ROLLOUT}.mode {mode} on a stack whose rollout is {case.stack.capabilities.rollout}"


@rule(
    "expert-groups",
    "error",
    reason="the engines of a sync rollout learn of each other by VLLM_DP_* variables alone, and the fields for it do "
    "not exist or are asserted against data_parallel_size",
    source="verl e2d45b00e verl/workers/config/rollout.py; recipe/r1_ascend (VLLM_DP_SIZE)",
    remedy="name a stack whose rollout takes expert_parallel_size; for a driver of your own, atlasrl.rollout_groups "
    "has the variables of each rank, and environment.VLLM_DP_SIZE says that it sets them",
)
def expert_groups(case: Case):
    rollout = case.recipe.rollout
    if case.can("expert_parallel", "option") != "environment" or rollout.expert == 1:
        return
    wanted = str(rollout.expert // rollout.tensor)
    if (found := case.environment.get("VLLM_DP_SIZE")) != wanted:
        yield f"VLLM_DP_SIZE is {found or 'not set'}, rollout.expert / rollout.tensor is {wanted}"


@rule(
    "sleep-segments",
    "error",
    reason="vllm-ascend's sleeping memory pool asserts that expandable segments are off",
    source="vllm-ascend v0.10.0rc1 and v0.11.0 device_allocator/camem.py",
    remedy="take expandable_segments:True out of PYTORCH_NPU_ALLOC_CONF; verl switches them by itself",
)
def sleep_segments(case: Case):
    conf = case.environment.get("PYTORCH_NPU_ALLOC_CONF", "")
    if case.vllm_on_npu and case.setting(f"{ROLLOUT}.free_cache_engine", True) and "expandable_segments:True" in conf:
        yield f"PYTORCH_NPU_ALLOC_CONF={conf} with free_cache_engine"


@rule(
    "sleep-not-compiled",
    "error",
    reason="without the custom kernels vllm-ascend has no sleep mode, and the weights of both phases must fit at once",
    source="vllm-ascend v0.10.0rc1 setup.py (COMPILE_CUSTOM_KERNELS), worker_v1.py sleep()",
    remedy="build with COMPILE_CUSTOM_KERNELS=1, or set free_cache_engine false",
)
def sleep_not_compiled(case: Case):
    if (
        case.vllm_on_npu
        and case.setting(f"{ROLLOUT}.free_cache_engine", True)
        and case.environment.get("COMPILE_CUSTOM_KERNELS") == "0"
    ):
        yield "COMPILE_CUSTOM_KERNELS=0 with free_cache_engine"


@rule(
    "eager-off",
    "error",
    reason="NotImplementedError: ACL graphs do not support DeepSeek",
    source=f"{CONFIG} check_ascend_config",
    remedy="set rollout.graph: none, or torchair",
)
def eager_off(case: Case):
    if (
        case.vllm_on_npu
        and case.latent
        and case.can("graph", "acl") == "torchair"
        and not case.setting(f"{ROLLOUT}.enforce_eager", False)
        and not case.additional(f"{TORCHAIR}.enabled")
    ):
        yield "enforce_eager is off and torchair is not on"


@rule(
    "experimental-graph",
    "warning",
    reason="ACL graphs are experimental for all but Qwen, and do not work with data and expert parallelism",
    source="vllm-ascend v0.11.0 ascend_config.py; vllm-ascend issue #2229",
    remedy="set rollout.graph: none",
)
def experimental_graph(case: Case):
    if (
        case.vllm_on_npu
        and case.latent
        and case.can("graph", "acl") == "acl"
        and not case.setting(f"{ROLLOUT}.enforce_eager", False)
        and not case.additional(f"{TORCHAIR}.enabled")
    ):
        yield "enforce_eager is off and torchair is not on"


@rule(
    "torchair-eager",
    "error",
    reason="RuntimeError: torchair cannot run in eager mode",
    source=f"{CONFIG} check_ascend_config",
    remedy="set rollout.graph: torchair, and nothing of it under `verl:`",
)
def torchair_eager(case: Case):
    if case.vllm_on_npu and case.additional(f"{TORCHAIR}.enabled") and case.setting(f"{ROLLOUT}.enforce_eager"):
        yield "torchair is on and enforce_eager is true"


@rule(
    "torchair-scheduler",
    "error",
    reason="torchair graphs work without chunked prefill only, and vLLM's own scheduler chunks",
    source="vllm-ascend v0.10.0rc1 docs/source/user_guide/feature_guide/graph_mode.md; recipe/r1_ascend",
    remedy="set rollout.graph: torchair, which turns both on",
)
def torchair_scheduler(case: Case):
    if case.additional(f"{TORCHAIR}.enabled") and not case.additional("ascend_scheduler_config.enabled"):
        yield "torchair is on without ascend_scheduler_config.enabled"


@rule(
    "torchair-options",
    "error",
    reason="RuntimeError: options of a graph mode that is off, or a batch size list that is none",
    source=f"{CONFIG} TorchairGraphConfig",
    remedy=f"set {ADDITIONAL}.{TORCHAIR}.enabled: true` and graph_batch_sizes to a list",
)
def torchair_options(case: Case):
    options = case.additional(TORCHAIR, {})
    if not isinstance(options, dict) or not options:
        return
    off = [name for name in options if options[name] and name not in {"enabled", "enable_view_optimize"}]
    if not options.get("enabled") and off:
        yield f"{', '.join(off)} without enabled"
    sizes = options.get("graph_batch_sizes", [])
    if not isinstance(sizes, list):
        yield f"graph_batch_sizes is {sizes!r}, not a list"
    elif sizes and options.get("graph_batch_sizes_init"):
        yield "graph_batch_sizes with graph_batch_sizes_init"


@rule(
    "torchair-frozen",
    "error",
    reason="the weights of step 0 would be baked into the graph",
    source="verl v0.7.0 recipe/r1_ascend (refresh true, enable_frozen_parameter false)",
    remedy=f"set {ADDITIONAL}.refresh: true` and leave enable_frozen_parameter and use_cached_graph off",
)
def torchair_frozen(case: Case):
    if not case.additional(f"{TORCHAIR}.enabled"):
        return
    for name in ("enable_frozen_parameter", "use_cached_graph"):
        if case.additional(f"{TORCHAIR}.{name}"):
            yield f"{name} while weights change"
    if not case.additional("refresh"):
        yield "refresh is not set"


@rule(
    "slow-latent-prefill",
    "error",
    reason="chunked prefill of latent attention pads to [b, 1, 1, s] masks and runs out of memory when many prompts "
    "are in flight",
    source="vllm-ascend v0.10.0rc1 mla_v1.py vanilla_chunked_prefill_mla; gone with vllm-ascend PR #2781",
    remedy="set rollout.chunked_prefill: true",
)
def slow_latent_prefill(case: Case):
    if not (case.vllm_on_npu and case.latent and case.can("chunked_prefill_mla", "always") == "option"):
        return
    chunked = case.setting(f"{ROLLOUT}.enable_chunked_prefill", True) or case.setting(
        f"{ROLLOUT}.enable_prefix_caching", False
    )
    prompts = case.recipe.dapo.gen_batch_size or case.recipe.dapo.train_batch_size
    if prompts >= 128 and chunked and not case.additional("chunked_prefill_for_mla"):
        yield f"{prompts} prompts a generation without chunked_prefill_for_mla"


@rule(
    "list-argument",
    "error",
    reason="verl passes lists to the server's command line as Python text, which vLLM cannot parse",
    source="verl v0.7.0 vllm_async_server.py (server_args); mended by build_cli_args_from_config in 0.7.1",
    remedy="take it out; lists inside of a mapping, such as compilation_config, arrive as they are",
)
def list_argument(case: Case):
    if case.recipe.rollout.engine == "vllm" and not case.can("list_arguments"):
        for key, value in case.settings.items():
            if key.rpartition(".")[0] == VLLM and isinstance(value, list):
                yield f"{key} is a list"


@rule(
    "dead-length",
    "warning",
    reason="verl overwrites it with the model's longest context: KV memory for 163,840 tokens a sequence",
    source="verl v0.7.0 vllm_async_server.py; mended in 0.7.1",
    remedy="take it out; the plan tells the engine data.max_prompt_tokens + data.max_response_tokens",
)
def dead_length(case: Case):
    if (length := case.setting(f"{ROLLOUT}.max_model_len")) and not case.can("keeps_max_model_len"):
        yield f"{ROLLOUT}.max_model_len {length} has no effect"


@rule(
    "dead-skip",
    "error",
    reason="the key parses and nobody reads it: the run generates as if it were not there",
    source="verl v0.7.0 verl/utils/rollout_skip.py is not on the way of async rollout",
    remedy="take it out; rollout.replay trains on recorded answers",
)
def dead_skip(case: Case):
    if case.setting(f"{ROLLOUT}.skip_rollout") and not case.can("skip_rollout"):
        yield f"{ROLLOUT}.skip_rollout has no effect on this stack"


@rule(
    "router-mismatch",
    "warning",
    reason="distributed checkpoints train with another router (seq_aux_loss, fp64) than mbridge (none, fp32)",
    source="verl v0.7.0 models/mcore/config_converter.py; mbridge 0.13.1 models/deepseek_v3.py",
    remedy="leave use_dist_checkpointing off, here and for the baseline",
)
def router_mismatch(case: Case):
    key = "actor_rollout_ref.actor.megatron.use_dist_checkpointing"
    if case.latent and case.setting(key) and not case.setting(f"{TRANSFORMER}.moe_router_load_balancing_type"):
        yield f"{key} is true"
