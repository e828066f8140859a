"""One FSDP2 worker of verl without Ray: its own sharding, optimizer and actor, measured by the memory probe.

`python fsdp2_worker.py SPEC RANK` with SPEC a JSON file: {"config": config.json's keys, "world", "port", "batch": the
fields of a Batch, "answers": rows of this worker, "steps", "folder": where the probe writes}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def main(spec: dict, rank: int) -> None:
    os.environ |= {"ATLASRL_MEMORY_PROBE": spec["folder"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spec["port"])}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(spec["world"]), "LOCAL_RANK": "0"}
    for plugin in ("atlasrl.trainer.cpu", "atlasrl.trainer.memory_probe"):
        importlib.import_module(plugin)
    import torch
    import torch.distributed as dist
    from omegaconf import OmegaConf
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from transformers import AutoConfig, AutoModelForCausalLM
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict, get_shard_placement_fn
    from verl.workers.actor.dp_actor import DataParallelPPOActor
    from verl.workers.config import FSDPActorConfig

    torch.manual_seed(0)
    dist.init_process_group("gloo", rank=rank, world_size=spec["world"])
    kind = spec["config"]["model_type"]
    rest = {key: value for key, value in spec["config"].items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **rest), attn_implementation="sdpa")
    mesh = init_device_mesh("cpu", (spec["world"],), mesh_dim_names=("fsdp",))
    state = model.state_dict()
    policy = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True)
    placement = get_shard_placement_fn(spec["world"])
    apply_fsdp2(model, {"mesh": mesh, "mp_policy": policy, "shard_placement_fn": placement}, {})
    fsdp2_load_full_state_dict(model, state, mesh, None)
    del state
    if spec["batch"]["recompute"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    batch = spec["batch"]
    config = {
        "_target_": "verl.workers.config.FSDPActorConfig",
        "strategy": "fsdp2",
        "rollout_n": 1,
        "ppo_mini_batch_size": spec["answers"],
        "ppo_micro_batch_size_per_gpu": batch["rows"],
        "use_torch_compile": False,
        "fsdp_config": {"_target_": "verl.workers.config.FSDPEngineConfig", "dtype": "float32"},
    }
    settings: FSDPActorConfig = omega_conf_to_dataclass(OmegaConf.create(config))
    actor = DataParallelPPOActor(settings, model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _ in range(spec["steps"]):
        one_step(actor, spec)
    dist.barrier()
    dist.destroy_process_group()


def one_step(actor, spec: dict) -> None:
    """Score a batch of random answers, then learn from it, as verl's worker does."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    batch, rows = spec["batch"], spec["answers"]
    width = batch["prompt"] + batch["response"]
    tokens = torch.randint(spec["config"]["vocab_size"], (rows, width))
    mask = torch.ones(rows, width, dtype=torch.long)
    tensors = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": mask.cumsum(-1) - 1,
        "responses": tokens[:, batch["prompt"] :],
        "response_mask": mask[:, batch["prompt"] :],
        "advantages": torch.randn(rows, batch["response"]),
    }
    data = DataProto(TensorDict(tensors, batch_size=rows), meta_info={"temperature": 1.0})
    data.meta_info |= {"micro_batch_size": batch["scored_rows"], "use_dynamic_bsz": False}
    scores, _ = actor.compute_log_prob(data, calculate_entropy=True)
    data.batch["old_log_probs"] = scores
    actor.update_policy(data)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
