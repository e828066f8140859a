"""Rules about checkpoints: what saves, what resumes, what exports."""

from __future__ import annotations

import re

from atlasrl.lint.case import ACTOR, MEGATRON, OPTIMIZER, Case
from atlasrl.lint.rule import rule

NEEDED = ("model", "optimizer", "extra", "hf_model")


@rule(
    "resume-import",
    "error",
    reason="every resume imports transformer_engine, which no NPU has; with a host optimizer the mended load is needed "
    "against KeyError master_param",
    source="verl issue #3517, PR #3850, PR #4938 (c0975d822)",
    remedy="leave the fix load-without-transformer-engine on, with a verl that it is for",
)
def resume_import(case: Case):
    if not case.megatron or case.recipe.device == "cuda" or case.can("resume_without_transformer_engine"):
        return
    if not case.mended("load-without-transformer-engine"):
        host = " with optimizer_cpu_offload" if case.setting(f"{OPTIMIZER}.optimizer_cpu_offload") else ""
        yield f"mbridge{host} on verl {case.stack.version('verl')}"


@rule(
    "save-arguments",
    "error",
    reason="the first checkpoint ends with TypeError: unexpected keyword argument distributed_filesystem",
    source="verl PR #4386 (d9ef1e5a8); mbridge 5691f71, in no release of PyPI up to 0.15.1",
    remedy="leave the fix mbridge-arguments on, or use mbridge from git",
)
def save_arguments(case: Case):
    if not case.megatron or case.can("mbridge_save_arguments", "any") != "distributed":
        return
    released = case.stack.packages["mbridge"].git is None
    if released and case.within("mbridge", "<=0.15.1") and not case.mended("mbridge-arguments"):
        yield f"verl {case.stack.version('verl')} with mbridge {case.stack.version('mbridge')} of PyPI"


@rule(
    "weights-on-one-device",
    "error",
    reason="mbridge reads to 'cuda' (edited: to the first NPU): it fails, or all ranks of a node fill its first device",
    source="mbridge 0.13.1 dequant_fp8_safetensor_io.py lines 34, 51; mbridge PR #52, commit 9b35aef",
    remedy="use mbridge 9b35aef or later (stack a2-0.7.0)",
)
def weights_on_one_device(case: Case):
    if case.on_npu and case.megatron and not case.can("mbridge_selects_device") and not case.mended("mbridge-device"):
        yield f"mbridge {case.stack.version('mbridge')} on NPUs"


@rule(
    "late-save",
    "error",
    reason="the step is called complete before its files are written; verl skips its tracker then as well",
    source="verl v0.7.0 verl/utils/checkpoint/megatron_checkpoint_manager.py (async_save)",
    remedy="leave async_save off",
)
def late_save(case: Case):
    if case.setting(f"{ACTOR}.checkpoint.async_save"):
        yield "checkpoint.async_save is on"


@rule(
    "save-contents",
    "error",
    reason="the checkpoint can then not be resumed or exported",
    source="verl v0.7.0 actor.checkpoint.save_contents",
    remedy="leave save_contents and load_contents as the plan sets them",
)
def save_contents(case: Case):
    for name in ("save_contents", "load_contents"):
        contents = case.setting(f"{ACTOR}.checkpoint.{name}", NEEDED)
        if isinstance(contents, (list, tuple)):
            missing = [part for part in NEEDED[: 4 if case.megatron and name == "save_contents" else 3]]
            missing = [part for part in missing if part not in contents]
            if missing and case.megatron:
                yield f"checkpoint.{name} lacks {', '.join(missing)}"


@rule(
    "stale-index-keys",
    "error",
    reason="mbridge writes a shard only when all its index keys came; others are left out with a mere warning",
    source="mbridge 0.13.1 core/safetensor_io.py save_hf_weight; Megatron-Bridge issue #1838 (Moonlight)",
    remedy="make the BF16 copy with the cast stage, or mend the index: bin/ckpt repair",
)
def stale_index_keys(case: Case):
    if not case.megatron:
        return
    layers = case.config.get("num_hidden_layers")
    kinds = {"inv_freq": "rotary_emb.inv_freq", "scale": "weight_scale_inv"}
    for kind in kinds.values():
        if stale := sum(name.endswith(kind) for name in case.index):
            yield f"the index of {case.recipe.model.cast_path} names {stale} x {kind}"
    if layers and not case.config.get("num_nextn_predict_layers"):
        numbers = [int(found[1]) for name in case.index if (found := re.match(r"model\.layers\.(\d+)\.", name))]
        if numbers and max(numbers) >= layers:
            yield f"the index of {case.recipe.model.cast_path} names layer {max(numbers)}, the model has {layers}"


@rule(
    "one-checkpoint",
    "warning",
    reason="a damaged newest checkpoint then costs the whole run",
    source="marin issue #5386; verl PR #4873",
    remedy="set checkpoint.keep: 2",
)
def one_checkpoint(case: Case):
    if case.recipe.checkpoint.keep == 1 and case.recipe.steps > case.recipe.checkpoint.save_every:
        yield "checkpoint.keep is 1"


@rule(
    "no-checkpoint",
    "warning",
    reason="a fault before the end costs everything since the start",
    source="arithmetic",
    remedy="lower checkpoint.save_every",
)
def no_checkpoint(case: Case):
    if case.recipe.checkpoint.save_every > case.recipe.steps:
        yield f"checkpoint.save_every {case.recipe.checkpoint.save_every} of {case.recipe.steps} steps"


@rule(
    "fresh-host-optimizer",
    "warning",
    reason="a resumed host optimizer has a stale Adam step or copies that were never loaded: watch the first losses",
    source="SkyRL PR #1401 and #1403; Megatron-LM issue #1842",
    remedy="after the first resume, compare the curve with the steps before: bin/compare marks a jump",
)
def fresh_host_optimizer(case: Case):
    if case.setting(f"{OPTIMIZER}.optimizer_cpu_offload") and case.within("megatron-core", "<0.13"):
        yield f"optimizer_cpu_offload on Megatron-core {case.stack.version('megatron-core')}"


@rule(
    "raw-weights",
    "error",
    reason="without mbridge verl asks for a distributed checkpoint that no stage of this project makes",
    source="verl v0.7.0 workers/megatron_workers.py",
    remedy=f"leave {MEGATRON}.use_mbridge on",
)
def raw_weights(case: Case):
    if case.megatron and not case.setting(f"{MEGATRON}.use_mbridge", True):
        yield "use_mbridge is off"
