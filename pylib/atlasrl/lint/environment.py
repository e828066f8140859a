"""Rules about the variables of every process of the job."""

from __future__ import annotations

from atlasrl.lint.case import Case
from atlasrl.lint.rule import rule

CANN = "CANN documentation, HCCL environment variables"


def _number(case: Case, name: str) -> int | None:
    text = case.environment.get(name, "")
    return int(text) if text.isdigit() else None


@rule(
    "visible-devices",
    "error",
    reason="all workers of a node would get the same devices; Ray and verl hand them out",
    source="Ray PR #59163; verl issue #6741",
    remedy="take it out; choose devices per node with --devices",
)
def visible_devices(case: Case):
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if name in case.environment:
            yield f"{name}={case.environment[name]}"


@rule(
    "rank-variables",
    "error",
    reason="one rank number on every process: torch's groups hang until the time-out",
    source="Ascend/mindcluster-deploy start.sh (unset LOCAL_WORLD_SIZE WORLD_SIZE LOCAL_RANK)",
    remedy="take it out; verl sets it for each worker",
)
def rank_variables(case: Case):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "VLLM_DP_RANK"):
        if name in case.environment:
            yield f"{name}={case.environment[name]}"


@rule(
    "connect-timeout",
    "error",
    reason="ranks that read weights at different speed miss each other (EI0006); outside 120 to 7200 it is refused",
    source=f"{CANN}; vllm-ascend issue #486",
    remedy="set HCCL_CONNECT_TIMEOUT=1800",
)
def connect_timeout(case: Case):
    if not case.on_npu:
        return
    seconds = _number(case, "HCCL_CONNECT_TIMEOUT")
    if seconds is None or not 600 <= seconds <= 7200:
        found = case.environment.get("HCCL_CONNECT_TIMEOUT", "not set (120)")
        yield f"HCCL_CONNECT_TIMEOUT is {found}"


@rule(
    "endless-timeout",
    "error",
    reason="0 is not honoured as 'never': the job ends after 30 minutes",
    source="Ascend/pytorch issue #54",
    remedy="set HCCL_EXEC_TIMEOUT=7200",
)
def endless_timeout(case: Case):
    if case.on_npu and _number(case, "HCCL_EXEC_TIMEOUT") == 0:
        yield "HCCL_EXEC_TIMEOUT=0"


@rule(
    "differing-timeouts",
    "warning",
    reason="the shorter clock ends the job first and names the wrong cause",
    source="verl v0.7.0 actor_rollout_ref.nccl_timeout (600 s); mindcluster-deploy sets 7200",
    remedy="take actor_rollout_ref.nccl_timeout out of `verl:`; the plan sets 7200",
)
def differing_timeouts(case: Case):
    if not case.on_npu:
        return
    group = case.setting("actor_rollout_ref.nccl_timeout", 600)
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        if (seconds := _number(case, name)) and seconds > group:
            yield f"actor_rollout_ref.nccl_timeout {group} s is less than {name} {seconds} s"


@rule(
    "large-buffers",
    "warning",
    reason="each communicator holds two such buffers, and a 671B layout has about twenty",
    source=f"{CANN} (HCCL_BUFFSIZE, default 200)",
    remedy="lower HCCL_BUFFSIZE; ceil(micro batch x tokens x hidden x 2 / 2**20) suffices",
)
def large_buffers(case: Case):
    if case.on_npu and (size := _number(case, "HCCL_BUFFSIZE")) and size > 400:
        yield f"HCCL_BUFFSIZE={size} MB is {2 * size * 20 / 1024:.0f} GiB in twenty communicators"


@rule(
    "blocking-launch",
    "warning",
    reason="every kernel is waited for: a tool for a fault, several times slower, and TASK_QUEUE_ENABLE is void",
    source="CANN documentation, ASCEND_LAUNCH_BLOCKING",
    remedy="take it out once the fault is found",
)
def blocking_launch(case: Case):
    if case.on_npu and case.environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        yield "ASCEND_LAUNCH_BLOCKING=1"


@rule(
    "old-engine",
    "error",
    reason="vllm-ascend from 0.10 on has the V1 engine only",
    source="vllm-ascend v0.10.0rc1 release notes",
    remedy="take VLLM_USE_V1 out, or set it to 1",
)
def old_engine(case: Case):
    if case.vllm_on_npu and case.environment.get("VLLM_USE_V1") == "0":
        yield "VLLM_USE_V1=0"


@rule(
    "private-format",
    "error",
    reason="weights in the NZ format cannot be overwritten by a weight sync; it is the default from 0.11 on",
    source="verl tests/special_npu/run_qwen3_30b_dapo_mindspeed.sh; vllm-ascend v0.11.0 envs.py",
    remedy="set VLLM_ASCEND_ENABLE_NZ=0",
)
def private_format(case: Case):
    if (
        case.vllm_on_npu
        and case.within("vllm-ascend", ">=0.11.0rc1")
        and (value := case.environment.get("VLLM_ASCEND_ENABLE_NZ", "1")) != "0"
    ):
        yield f"VLLM_ASCEND_ENABLE_NZ={value}"


@rule(
    "half-deterministic",
    "warning",
    reason="one variable alone does not make runs repeat: matrix products and collectives each have theirs",
    source="verl v0.7.0 docs/ascend_tutorial/ascend_consistency.rst",
    remedy="take them out and set `deterministic: true`, which sets the whole set and proves it on every worker",
)
def half_deterministic(case: Case):
    common = {"CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    collectives = {"HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC"} & case.environment.keys()
    held = {name for name, value in common.items() if case.environment.get(name) == value}
    wanted = common.keys() if case.vllm_on_npu else common.keys() - {"VLLM_ENABLE_V1_MULTIPROCESSING"}
    if case.on_npu and (held or collectives) and not (wanted <= held and collectives):
        lacking = sorted(wanted - held) + ([] if collectives else ["HCCL_DETERMINISTIC"])
        yield f"{', '.join(sorted(held | collectives))} without {', '.join(lacking)}"
