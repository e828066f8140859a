"""One actor worker of verl without Ray, as a run's plan describes it: scores random answers and learns from them.

`python verl_worker.py RUN RANK PORT STEPS`; the memory probe of the plan's recipe writes what it measures.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(run: str, rank: str, port: str, steps: str) -> None:
    from atlasrl import recipe as recipes
    from atlasrl.rundir import RunDir
    from atlasrl.trainer import setup

    plan = json.loads(Path(run, "plan.json").read_text())
    recipe = recipes.parse(plan["recipe"], run)
    world = str(plan["nodes"] * plan["devices_per_node"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": world}
    setup.prepare_environment(plan, recipe, RunDir(Path(run)).attempt(1), 0)
    import torch.distributed as dist
    import verl  # noqa: F401  loads the plug-ins
    from omegaconf import OmegaConf

    if recipe.backend == "megatron":
        from verl.workers.megatron_workers import ActorRolloutRefWorker
    else:
        from verl.workers.fsdp_workers import ActorRolloutRefWorker

    config = setup.compose(plan, recipe, None).actor_rollout_ref
    OmegaConf.resolve(config)
    config.actor.optim.total_training_steps = int(steps)
    worker = ActorRolloutRefWorker(config, "actor_rollout")
    worker.init_model()
    for step in range(int(steps)):
        batch = random_answers(recipe, int(world), seed=step * int(world) + int(rank))
        batch.batch["old_log_probs"] = worker.compute_log_prob(batch).batch["old_log_probs"]
        worker.update_actor(batch)
    dist.barrier()
    dist.destroy_process_group()


def random_answers(recipe, world: int, seed: int):
    """What one of `world` workers gets of a batch: rows without padding."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    rows = recipe.dapo.train_batch_size * recipe.rollout.samples // world
    prompt, response = recipe.data.max_prompt_tokens, recipe.data.max_response_tokens
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 17, (rows, prompt + response), generator=generator)
    mask = torch.ones_like(tokens)
    tensors = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": mask.cumsum(-1) - 1,
        "responses": tokens[:, prompt:].contiguous(),
        "response_mask": mask[:, prompt:].contiguous(),
        "advantages": torch.randn(rows, response, generator=generator),
    }
    lengths = [prompt + response] * rows * world
    return DataProto(TensorDict(tensors, batch_size=rows), meta_info={"temperature": 1.0, "global_token_num": lengths})


if __name__ == "__main__":
    main(*sys.argv[1:])
