"""What every worker really holds: exact tensor bytes and resident memory, phase by phase. A plugin for measuring runs.

Name it in VERL_USE_EXTERNAL_MODULES behind the device's plugin and set ATLASRL_MEMORY_PROBE to a folder. Every worker
writes rank<R>.jsonl there, one line per phase: {"phase", "start", "peak", "end"} in resident bytes, with the bytes of
weights, gradients, optimizer state and logits as it finds them in its tensors. It reads and changes nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from pathlib import Path

from atlasrl.memory import rss
from atlasrl.trainer.patches import apply, patch

FOLDER = "ATLASRL_MEMORY_PROBE"

_largest_logits = 0


def write(record: dict) -> None:
    import torch.distributed as dist

    with (Path(os.environ[FOLDER]) / f"rank{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def phase(name: str, actor=None):
    """Measure one phase of this process; with an actor also what its tensors hold afterwards."""
    global _largest_logits
    _largest_logits = 0
    rss.reset_peak()
    start = rss.status()["rss"]
    yield
    end = rss.status()
    record = {"phase": name, "start": start, "peak": end["peak"], "end": end["rss"]}
    write(record | ({**held(actor), "logits": _largest_logits} if actor is not None else {}))


def held(actor) -> dict[str, int]:
    """Bytes of this rank's buffers and, from the first step on, optimizer state."""
    states = actor.actor_optimizer.state.values()
    return {
        "buffers": sum(size_of(buffer) for buffer in actor.actor_module.buffers()),
        "optimizer": sum(size_of(tensor) for state in states for tensor in state.values()),
    }


def shards(module) -> dict[str, int]:
    """Bytes of this rank's weights and gradients. After a backward; a forward leaves the root unit gathered."""
    parameters = list(module.parameters())
    return {
        "weights": sum(size_of(p) for p in parameters),
        "gradients": sum(size_of(p.grad) for p in parameters if p.grad is not None),
    }


def size_of(tensor) -> int:
    """Bytes of a tensor, or of this rank's shard of a distributed one."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def watch_logits(module) -> None:
    """Remember the largest output of the model's last layer."""
    if getattr(module, "_probed", False):
        return
    module._probed = True

    def note(_layer, _inputs, output):
        global _largest_logits
        _largest_logits = max(_largest_logits, output.numel() * output.element_size())

    module.get_output_embeddings().register_forward_hook(note)


def _method(name: str, expects: str, module: str = "verl.workers.actor.dp_actor:DataParallelPPOActor"):
    return patch(
        id="memory-probe",
        reason="measure tensor bytes and resident memory of every phase",
        upstream="for measuring only",
        package="verl",
        versions=">=0.7.0,<0.8",
        target=f"{module}.{name}",
        expects=expects,
    )


@_method("update_policy", "self.log(decorated_function")  # verl wraps it in a logger
def probed_update(original):
    @functools.wraps(original)
    def update_policy(self, data, **options):
        watch_logits(self.actor_module)
        with phase("update", self):
            return original(self, data, **options)

    return update_policy


@_method("compute_log_prob", "self.log(decorated_function")
def probed_log_prob(original):
    @functools.wraps(original)
    def compute_log_prob(self, *arguments, **options):
        watch_logits(self.actor_module)
        with phase("log_prob", self):
            return original(self, *arguments, **options)

    return compute_log_prob


@_method("_optimizer_step", "self.actor_optimizer.step()")
def probed_step(original):
    @functools.wraps(original)
    def optimizer_step(self):
        write({"phase": "step", "start": rss.status()["rss"]} | shards(self.actor_module))
        return original(self)

    return optimizer_step


apply("memory-probe")
