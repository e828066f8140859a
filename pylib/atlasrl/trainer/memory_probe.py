"""What every worker really holds: exact tensor bytes and resident memory, phase by phase. Loaded by runs on a CPU whose
recipe sets `probe.memory`.

Every worker writes rank<R>.jsonl into the attempt's folder of workers, one line per phase: {"phase", "start", "peak",
"end"} in resident bytes, "tokens" of the longest row, "routed" tokens that the experts of one layer got here, and the
bytes of weights, gradients, optimizer state and logits as it finds them in its tensors. It changes nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from atlasrl.memory import rss
from atlasrl.trainer.patches import apply, patch
from atlasrl.trainer.setup import MEMORY_FOLDER

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h

_largest: dict[str, int] = {}
"""What lives only within a phase: kind -> most since the phase began."""


def fix_thresholds() -> None:
    """Give every larger tensor back to the system when it dies.

    glibc raises its threshold for separate mappings with every freed block, and then keeps freed memory: resident
    memory would show the history instead of the tensors.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 64 * 2**10)
    libc.mallopt(M_TRIM_THRESHOLD, 128 * 2**10)


@contextlib.contextmanager
def phase(name: str, model, tokens: int):
    """Measure one phase of this process and what its tensors hold afterwards."""
    import torch.distributed as dist

    _largest.clear()
    rss.reset_peak()
    start = rss.status()["rss"]
    yield
    end = rss.status()
    record = {"phase": name, "start": start, "peak": end["peak"], "end": end["rss"], "tokens": tokens}
    with (Path(os.environ[MEMORY_FOLDER]) / f"rank{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(record | model.held() | _largest) + "\n")


def note(kind: str, size: int) -> None:
    _largest[kind] = max(_largest.get(kind, 0), size)


def size_of(tensor) -> int:
    """Bytes of a tensor, or of this rank's shard of a distributed one."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def stored(tensors: Iterable) -> int:
    """Bytes of the memory behind tensors; several may lie in one buffer."""
    return sum({(s := tensor.untyped_storage()).data_ptr(): s.nbytes() for tensor in tensors}.values())


def watch(module, kind: str, measure: Callable) -> None:
    """Note `measure(inputs, output)` of every forward of a module."""
    if not hasattr(module, "_probed"):
        module._probed = module.register_forward_hook(
            lambda _module, inputs, output: note(kind, measure(inputs, output))
        )


class Sharded:
    """An FSDP2 actor."""

    def __init__(self, actor):
        self.actor = actor
        watch(actor.actor_module.get_output_embeddings(), "logits", lambda _, output: size_of(output))

    def held(self) -> dict[str, int]:
        """Whole buffers and, from the first step on, this rank's optimizer state."""
        states = self.actor.actor_optimizer.state.values()
        return {
            "buffers": sum(map(size_of, self.actor.actor_module.buffers())),
            "optimizer": sum(size_of(tensor) for state in states for tensor in state.values()),
        }

    def note_shards(self) -> None:
        """This rank's weights and gradients. After a backward: a forward leaves the root unit gathered."""
        parameters = [*self.actor.actor_module.parameters()]
        note("weights", sum(map(size_of, parameters)))
        note("gradients", sum(size_of(p.grad) for p in parameters if p.grad is not None))


class Megatron:
    """A Megatron actor; its model is a list of chunks, its optimizer a chain of those of dense and routed weights."""

    def __init__(self, actor):
        self.actor = actor
        for chunk in actor.actor_module:
            for name, module in chunk.named_modules():
                if name.endswith("output_layer"):
                    watch(module, "logits", lambda _, output: size_of(output[0]))
                elif name.endswith("mlp.experts"):
                    watch(module, "routed", lambda inputs, _: inputs[0].shape[0])

    def held(self) -> dict[str, int]:
        parameters = [p for chunk in self.actor.actor_module for p in chunk.parameters()]
        buffers = [buffer for chunk in self.actor.actor_module for _, buffer in chunk.named_buffers()]
        chain = getattr(self.actor.actor_optimizer, "chained_optimizers", [self.actor.actor_optimizer])
        states = [state for each in chain for state in each.optimizer.state.values()]
        return {
            "weights": stored(p.data for p in parameters),
            "gradients": stored(p.main_grad for p in parameters),
            "buffers": sum(map(size_of, buffers)),
            "optimizer": sum(size_of(tensor) for state in states for tensor in state.values()),
        }


FSDP2_ACTOR = "verl.workers.actor.dp_actor:DataParallelPPOActor"
MEGATRON_ACTOR = "verl.workers.actor.megatron_actor:MegatronPPOActor"


def _method(target: str, expects: str = "self.log(decorated_function"):  # verl wraps the phases in a logger
    return patch(
        id="memory-probe",
        reason="measure tensor bytes and resident memory of every phase",
        upstream="for measuring only",
        package="verl",
        versions=">=0.7.0,<0.8",
        target=target,
        expects=expects,
    )


@_method(f"{FSDP2_ACTOR}.update_policy")
def probed_update(original):
    @functools.wraps(original)
    def update_policy(self, data, **options):
        with phase("update", Sharded(self), data.batch["input_ids"].shape[1]):
            return original(self, data, **options)

    return update_policy


@_method(f"{FSDP2_ACTOR}.compute_log_prob")
def probed_log_prob(original):
    @functools.wraps(original)
    def compute_log_prob(self, data, **options):
        with phase("log_prob", Sharded(self), data.batch["input_ids"].shape[1]):
            return original(self, data, **options)

    return compute_log_prob


@_method(f"{FSDP2_ACTOR}._optimizer_step", "self.actor_optimizer.step()")
def probed_step(original):
    @functools.wraps(original)
    def optimizer_step(self):
        Sharded(self).note_shards()
        return original(self)

    return optimizer_step


@_method(f"{MEGATRON_ACTOR}.compute_log_prob")
def probed_megatron_log_prob(original):
    @functools.wraps(original)
    def compute_log_prob(self, data, **options):
        # verl cuts a batch to its longest row; what is scored is then learnt from
        self.probed_tokens = int(data.batch["attention_mask"].sum(-1).max())
        with phase("log_prob", Megatron(self), self.probed_tokens):
            return original(self, data, **options)

    return compute_log_prob


@_method(f"{MEGATRON_ACTOR}.update_policy")
def probed_megatron_update(original):
    @functools.wraps(original)
    def update_policy(self, dataloader):
        with phase("update", Megatron(self), self.probed_tokens):
            return original(self, dataloader)

    return update_policy


fix_thresholds()
apply("memory-probe")
