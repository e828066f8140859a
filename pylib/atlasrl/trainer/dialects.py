"""verl's settings as a stack's verl spells them. Pure.

`overrides` speaks verl 0.7.0. Other versions moved, dropped or added keys; each change is one line of data here. What
the recipe says under `verl:` is left as it is: it was written for the stack that the recipe names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from atlasrl.trainer.override import Override

if TYPE_CHECKING:
    from atlasrl.recipe import Recipe
    from atlasrl.stacks import Stack

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
CHUNKED_PREFILL = f"{ENGINE}.additional_config.chunked_prefill_for_mla"

DRIVEN = "==0.7.0"
"""The verl that our trainer drives. For the others a plan can be made and judged, and lint stops the run."""

MOVED: dict[str, dict[str, str | None]] = {
    "verl-0.7.1": {
        # Rewards come from the reward loop alone, with a section of their own.
        "reward_model.use_reward_loop": None,
        "reward_manager.name": "reward.reward_manager.name",
        "reward_model.reward_manager": None,
        "reward_model.enable": "reward.reward_model.enable",
        "reward_model.reward_kwargs.overlong_buffer_cfg": "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.reward_kwargs.max_resp_len": "reward.reward_kwargs.max_resp_len",
        "custom_reward_function.path": "reward.custom_reward_function.path",
        f"{ENGINE}.max_model_len": f"{ROLLOUT}.max_model_len",
    },
    "verl-e2d45b00e": {
        "reward_model.use_reward_loop": None,  # the trainer's manager is the default here
        "reward_manager.name": None,  # reward_model.reward_manager says it
        f"{ROLLOUT}.expert_parallel_size": None,  # asserted against data_parallel_size, which sync rollout keeps at 1
        f"{ROLLOUT}.data_parallel_size": None,  # verl would hand the same prompts to all data ranks
        f"{ENGINE}.max_model_len": f"{ROLLOUT}.max_model_len",  # verl passes both: TypeError
    },
}
"""Key of verl 0.7.0 -> key of this version, or None where it has no meaning."""

MEGATRON_LACKS = {
    "verl-e2d45b00e": {
        "actor_rollout_ref.model.enable_gradient_checkpointing",  # Megatron recomputes by its own settings
        "actor_rollout_ref.actor.megatron.use_remove_padding",
    }
}


def translated(overrides: list[Override], recipe: Recipe, stack: Stack | None) -> list[Override]:
    """The overrides of verl 0.7.0 in the words of the stack's verl; unchanged where no stack is known."""
    line = stack.capabilities.config_keys if stack else None
    moved = dict(MOVED.get(line, {}))
    if recipe.backend == "megatron":
        moved |= dict.fromkeys(MEGATRON_LACKS.get(line, ()))
    if stack and stack.capabilities.chunked_prefill_mla == "always":
        moved[CHUNKED_PREFILL] = None  # vllm-ascend PR #2781
    said = []
    for override in overrides:
        name = override.key.lstrip("+")
        if override.key in recipe.verl or name not in moved:
            said.append(override)
        elif (new := moved[name]) is not None:
            said.append(replace(override, key=override.key.replace(name, new)))
    if stack and stack.capabilities.expert_parallel == "environment" and recipe.rollout.expert > 1:
        key = f"++{ENGINE}.enable_expert_parallel"
        said.append(Override(key, True, "recipe: rollout.expert; data ranks come from VLLM_DP_*"))
    return said
