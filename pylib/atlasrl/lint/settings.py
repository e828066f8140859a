"""Rules about verl's settings as such: do they exist, and are they the recipe's to set."""

from __future__ import annotations

import difflib

from atlasrl.lint.case import ACTOR, Case
from atlasrl.lint.rule import rule
from atlasrl.stacks import DEFAULT
from atlasrl.trainer.dialects import DRIVEN

FREE = ("override_transformer_config", "override_optimizer_config", "override_ddp_config", "override_config",
        "engine_kwargs", "reward_kwargs", "sampling_kwargs", "mbridge_config", "tool_config", "custom_cls")  # fmt: skip
"""Sections whose keys belong to another package."""

OURS = {
    "trainer.nnodes": "--nodes",
    "trainer.n_gpus_per_node": "--devices",
    "trainer.device": "the recipe's device",
    "trainer.default_local_dir": "--runs and --name",
    "trainer.resume_mode": "bin/resume",
    "trainer.resume_from_path": "bin/resume --step",
    "trainer.save_freq": "checkpoint.save_every",
    "trainer.total_training_steps": "steps",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.max_critic_ckpt_to_keep": "checkpoint.keep",
    "trainer.del_local_ckpt_after_load": "nothing: checkpoints are never removed by loading",
    "trainer.default_hdfs_dir": "nothing: verl cannot load from there",
    "actor_rollout_ref.model.path": "model.path",
}


@rule(
    "trainer-verl",
    "error",
    reason="the trainer gives its scores to verl as functions and syncs engines inside of the workers, as 0.7.0 has it",
    source="docs/upstream.md, What other versions of verl changed",
    remedy=f"name stack: {DEFAULT['npu']}, or leave `stack` out",
)
def trainer_verl(case: Case):
    if case.stack is not None and not case.within("verl", DRIVEN):
        yield f"the trainer drives verl {DRIVEN}, the stack has {case.stack.version('verl')}"


@rule(
    "refused-settings",
    "error",
    reason="verl would refuse it after minutes, on every node",
    source="verl v0.7.0 verl/utils/config.py validate_config",
    remedy="change the recipe as the message says",
)
def refused(case: Case):
    if case.refused:
        yield case.refused


@rule(
    "unknown-setting",
    "error",
    reason="hydra refuses an unknown key, and with ++ it is accepted and never read, or its dataclass raises",
    source="verl verl/trainer/config and verl/workers/config of the stack's version",
    remedy="correct the key under `verl:`, or choose the stack that has it",
)
def unknown_setting(case: Case):
    from atlasrl import stacks

    known = stacks.config_keys(case.stack, case.recipe.backend) if case.stack else None
    if not known:
        return
    for key in case.recipe.verl:
        name = key.lstrip("+")
        if name in known or any(part in FREE for part in name.split(".")):
            continue
        if any(each.startswith(f"{name}.") for each in known):
            continue
        near = difflib.get_close_matches(name, known, 1, cutoff=0.7)
        yield f"verl.{key} is no setting of {case.stack.capabilities.config_keys}" + (
            f"; did you mean {near[0]}?" if near else ""
        )


@rule(
    "reserved-setting",
    "error",
    reason="the plan, the journal and bin/resume would go by another value than verl",
    source="verl v0.7.0 verl/trainer/ppo/ray_trainer.py; verl PR #4873, issue #7395 (checkpoints lost or orphaned)",
    remedy="take the key out of `verl:`",
)
def reserved_setting(case: Case):
    for key in case.recipe.verl:
        if (instead := OURS.get(key.lstrip("+"))) is not None:
            yield f"verl.{key} is decided by {instead}"


@rule(
    "validation-without-data",
    "warning",
    reason="no validation will run",
    source="verl v0.7.0 verl/trainer/ppo/ray_trainer.py (test_freq)",
    remedy="set data.val, or validate_every: 0",
)
def validation_without_data(case: Case):
    if case.recipe.validate_every and case.recipe.data.val is None and case.recipe.inputs is None:
        yield f"validate_every is {case.recipe.validate_every} and data.val is not set"


@rule(
    "kl-reference",
    "warning",
    reason="a KL term asks for a reference model, whose weights the memory model adds, and DAPO has none",
    source="DAPO, arXiv 2503.14476, section 2.3",
    remedy=f"leave {ACTOR}.use_kl_loss and algorithm.use_kl_in_reward out",
)
def kl_reference(case: Case):
    for key in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"):
        if case.setting(key):
            yield f"{key} is on"
