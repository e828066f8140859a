"""What a run asks of a device: the numbers of a recipe that decide about memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from atlasrl.errors import UsageFault
from atlasrl.legality import RolloutSplit, Split, split_of
from atlasrl.memory import architecture, shapes
from atlasrl.memory.activations import Recompute
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.parameters import share

if TYPE_CHECKING:
    from pathlib import Path

    from atlasrl.recipe import Recipe

GIB = 2**30
MIB = 2**20

# What the driver reports as total, not what the label says: 60.96 GiB of a "64 GB" Atlas A2 card (vllm-ascend #264),
# 79.1 GiB of an "80 GB" H100.
DEVICE_BYTES = {"npu": int(60.96 * GIB), "cuda": int(79.1 * GIB)}
HCCL_BUFFSIZE = 200  # MB; Huawei's default of the environment variable of that name


@dataclass(frozen=True)
class Job:
    """Sizes in bytes, lengths in tokens."""

    device: int  # bytes of one device
    devices_per_node: int = 8
    sequence: int = 4096  # longest prompt + response
    tokens: int = 4096  # of one micro-batch, over all context-parallel ranks
    micro_batches: int = 16  # of one optimizer step, on one data-parallel rank
    batch_sequences: int = 512  # answers of one training step, all ranks
    recompute: Recompute = field(default_factory=Recompute)
    offload: bool = False  # verl's param_offload, grad_offload and optimizer_offload
    optimizer_on_host: float = 0.0
    distributed_optimizer: bool = True
    gradient_bytes: int = 4
    update_logit_bytes: int = 6
    score_logit_bytes: int = 16
    reference: bool = False
    rollout: RolloutSplit = field(default_factory=RolloutSplit)
    memory_fraction: float = 0.6
    rollout_activations: int = 2 * GIB
    buffer: int = HCCL_BUFFSIZE * MIB
    communication: int | None = None  # bytes; None: derived from the groups
    runtime: int = 2 * GIB


def architecture_of(recipe: Recipe, config: Path | None = None) -> Architecture:
    """The architecture of a recipe's model: from `config`, else the model folder, else the published shapes.

    Raises:
        UsageFault: none of them exists.
    """
    if config is not None:
        return architecture.read(config)
    path = recipe.model.path
    if path is None:
        raise UsageFault(
            "the recipe's inputs script makes the model; pass --config FILE, or --run DIR of a created run"
        )
    if (path / "config.json").is_file():
        return architecture.read(path)
    if (known := shapes.find(path.name)) is not None:
        return known
    raise UsageFault(
        f"{path} is not on this machine and {path.name!r} is none of {', '.join(shapes.CONFIGS)}; pass --config FILE"
    )


def of_recipe(
    recipe: Recipe, a: Architecture, nodes: int | None = None, device_bytes: int | None = None
) -> tuple[Split, Job]:
    """The training split and the job of a recipe.

    Raises:
        UsageFault: the size of the device is unknown.
    """
    device = device_bytes or DEVICE_BYTES.get(recipe.device)
    if device is None:
        raise UsageFault(f"the memory of a {recipe.device} device is unknown; pass --device-gib")
    split = split_of(recipe, a, nodes)
    p, dapo = recipe.parallel, recipe.dapo
    job = Job(
        device=device,
        devices_per_node=recipe.devices_per_node,
        sequence=recipe.data.max_prompt_tokens + recipe.data.max_response_tokens,
        batch_sequences=dapo.train_batch_size * recipe.rollout.samples,
        recompute=Recompute(p.recompute, p.recompute_method, p.recompute_layers, frozenset(p.recompute_modules)),
        offload=p.offload,
        optimizer_on_host=p.optimizer_on_host,
        distributed_optimizer=p.distributed_optimizer,
        update_logit_bytes=16 if _flag(recipe, "actor_rollout_ref.actor.entropy_coeff") else 6,
        reference=_flag(recipe, "actor_rollout_ref.actor.use_kl_loss") or _flag(recipe, "algorithm.use_kl_in_reward"),
        rollout=RolloutSplit(recipe.rollout.tensor, recipe.rollout.expert),
        memory_fraction=recipe.rollout.memory_fraction,
        buffer=_buffer(recipe),
    )
    return split, batched(job, recipe, split)


def batched(job: Job, recipe: Recipe, split: Split) -> Job:
    """The job with the micro-batches that `split` leaves to one data-parallel rank."""
    dapo = recipe.dapo
    answers = share(dapo.mini_batch_size * recipe.rollout.samples, max(split.data, 1))
    if dapo.tokens_per_device is None:
        tokens, micro_batches = dapo.micro_batch_size * job.sequence, share(answers, dapo.micro_batch_size)
    else:  # verl multiplies max_token_len by the context-parallel size
        tokens = dapo.tokens_per_device * split.context
        micro_batches = share(answers * job.sequence, tokens)
    return dataclasses.replace(job, tokens=tokens, micro_batches=micro_batches)


def _flag(recipe: Recipe, key: str) -> bool:
    return bool(recipe.verl.get(key, False))


def _buffer(recipe: Recipe) -> int:
    text = recipe.environment.get("HCCL_BUFFSIZE", str(HCCL_BUFFSIZE))
    if not text.isdigit():
        raise UsageFault(f"environment.HCCL_BUFFSIZE is {text!r}; it is a whole number of megabytes, such as 200")
    return int(text) * MIB if recipe.device == "npu" else 0
