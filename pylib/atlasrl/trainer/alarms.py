"""Cheap checks inside every Megatron worker, at start and every few steps. Each one ends the run with one line.

They look at what runs, not at what was configured: the flags of the live optimizer, the numbers that the live attention
computes, the bits of the live parameters.
"""

from __future__ import annotations

import os

import torch

from atlasrl.errors import Fault
from atlasrl.precision import structure
from atlasrl.trainer.patches import patch

PATCHES = ("alarm-at-start", "alarm-replicas")
DIGEST_EVERY = "ATLASRL_DIGEST_EVERY"
"""Environment: compare the parameters of data-parallel replicas after every so many updates (default 10; 0: never)."""
SCALE_TOLERANCE = {torch.float32: 1e-4}
SCALE_TOLERANCE_HALF = 1e-2
"""Of the attention scale. The wrong scales seen in the wild are off by 1.2 % to 22 % (docs/upstream.md)."""


def _actor_patch(id: str, method: str, expects: str):
    return patch(
        id=id,
        reason="a silent fault of the stack must end the run, not bend its curve",
        upstream="none: a check of ours",
        package="verl",
        versions=">=0.7.0,<0.8",
        target=f"verl.workers.actor.megatron_actor:MegatronPPOActor.{method}",
        expects=expects,
    )


@_actor_patch("alarm-at-start", "__init__", "self.actor_optimizer")
def check_at_start(original):
    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.actor_optimizer is not None:
            check_optimizer_flags(self.actor_module, self.actor_optimizer)
        check_attention_scale(self.actor_module, self.hf_config)

    return __init__


@_actor_patch("alarm-replicas", "make_minibatch_iterator", "data.make_iterator(")
def check_replicas_now_and_then(original):
    every = int(os.environ.get(DIGEST_EVERY, "10"))

    def make_minibatch_iterator(self, data):
        """Called once at the start of every update: what it finds, the updates before have left."""
        self._updates = getattr(self, "_updates", 0)
        if every and self._updates % every == 0:
            check_replicas(self.actor_module)
        self._updates += 1
        return original(self, data)

    return make_minibatch_iterator


def check_optimizer_flags(modules, optimizer) -> None:
    """DDP and the optimizer must agree on who owns which part of a gradient.

    Raises:
        Fault: they differ (verl 0.7 with mbridge and use_distributed_optimizer=False, verl PR #5775).
    """
    shards = bool(modules[0].ddp_config.use_distributed_optimizer)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        steps_on_shards = type(part).__name__ == "DistributedOptimizer"
        if steps_on_shards != shards:
            raise Fault(
                f"DDP has use_distributed_optimizer={shards}, but the optimizer is {type(part).__name__}: each worker "
                "would step on gradients that are reduced only in its own shard; set "
                "actor.megatron.override_ddp_config.use_distributed_optimizer to the same value, or keep the fix "
                "ddp-optimizer-flag"
            )


def check_attention_scale(modules, hf_config) -> None:
    """Latent attention must scale its logits as the checkpoint's config.json says.

    Raises:
        Fault: the running attention applies another scale (MindSpeed before !2976 ignores the yarn factor).
    """
    attention = next((m for chunk in modules for m in chunk.modules() if type(m).__name__ == "MLASelfAttention"), None)
    if attention is None:
        return
    expected = structure.expected_scale(hf_config.to_dict()).value
    dtype = next(attention.parameters()).dtype
    try:
        found, how = measured_scale(attention, dtype), "applies"
    except Exception as problem:  # kernels differ in the shapes and masks they accept; reading is second best
        found, how = float(attention.core_attention.softmax_scale), f"is set to (not measured: {problem})"
    if abs(found - expected) > SCALE_TOLERANCE.get(dtype, SCALE_TOLERANCE_HALF) * expected:
        raise Fault(
            f"latent attention {how} a softmax scale of {found:.6f}, config.json says {expected:.6f} "
            f"({found / expected - 1:+.1%}): log-probabilities will differ from the rollout engine's; on an NPU update "
            "MindSpeed to a25e413e or later (branch 2.2.0_core_r0.12.1)"
        )


@torch.no_grad()
def measured_scale(attention, dtype: torch.dtype) -> float:
    """The scale that the attention core really applies, found from its output.

    A second token looks at two keys whose products with the query are 0 and d; values 0 and 1 make its output
    p = sigmoid(scale · d), so scale = logit(p) / d. Averaged over many d, which evens out half precision.
    """
    core, config = attention.core_attention, attention.config
    heads, size = attention.num_attention_heads_per_partition, attention.q_head_dim
    device = next(attention.parameters()).device
    if device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda")  # parameters may be offloaded while the core runs on the accelerator
    probes = 64
    distances = torch.linspace(4.0, 12.0, probes, dtype=torch.float32)
    query = torch.zeros(2, probes, heads, size)
    key, value = torch.zeros_like(query), torch.zeros(2, probes, heads, config.v_head_dim)
    query[1, :, :, 0] = 1.0
    key[1, :, :, 0] = distances[:, None]
    value[1] = 1.0
    query, key, value = (tensor.to(device, dtype) for tensor in (query, key, value))
    future = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device).triu(1)
    mode = core.training
    try:
        output = core.eval()(query, key, value, future, attn_mask_type=attention.attn_mask_type)
    finally:
        core.train(mode)
    share = output.reshape(2, probes, -1)[1].float().cpu().mean(-1)
    return (torch.logit(share) / key[1, :, 0, 0].float().cpu()).mean().item()


@torch.no_grad()
def check_replicas(modules) -> None:
    """Parameters must be bit-equal on all data-parallel replicas.

    Raises:
        Fault: names the first parameter that differs and the number of those that do.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = {
        True: parallel_state.get_data_parallel_group(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    named = [(name, p) for chunk in modules for name, p in chunk.named_parameters()]
    for shared, group in groups.items():
        ours = [(name, p) for name, p in named if getattr(p, "allreduce", True) == shared]
        if not ours or dist.get_world_size(group) == 1:
            continue
        sums = torch.stack([_digest(p) for _, p in ours])
        highest, lowest = sums.clone(), sums.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        different = [name for (name, _), high, low in zip(ours, highest, lowest, strict=True) if high != low]
        if different:
            raise Fault(
                f"{len(different)} of {len(ours)} parameters differ between the data-parallel replicas, first "
                f"{different[0]}: gradients are not reduced as the optimizer expects; run bin/selftest with this "
                "layout, and resume from a checkpoint written before the replicas parted"
            )


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    """A sum over the parameter's bits, each weighted by its place."""
    bits = parameter.detach().reshape(-1).view(torch.int16 if parameter.element_size() == 2 else torch.int32).long()
    places = torch.arange(bits.numel(), device=bits.device, dtype=torch.long) % 65_521 + 1
    return (bits * places).sum()
