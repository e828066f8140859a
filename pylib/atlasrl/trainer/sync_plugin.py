"""Watch the first weight syncs of every worker. Loaded by runs whose recipe sets `probe.syncs`.

Works for any rollout whose engine lives in the worker (vLLM in verl 0.7.0, the CPU rollout): what training sends is
digested on its way, the rollout's model before and after, and its derived tensors are checked for staleness. Of an
engine in another process only what is sent is known.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from atlasrl.precision import aliases, weights
from atlasrl.trainer import patches
from atlasrl.trainer.patches import patch
from atlasrl.trainer.setup import WATCH_FOLDER, WATCH_SYNCS


@patch(
    id="sync-watch",
    reason="weights that do not reach the rollout show in the curve weeks later; their digests show at once",
    upstream="none: a check of ours",
    package="verl",
    versions=">=0.7.0,<0.8",
    target="verl.workers.rollout.base:get_rollout_class",
    expects="_ROLLOUT_REGISTRY[(rollout_name, mode)]",
)
def watch_rollouts(original):
    def get_rollout_class(*args, **kwargs):
        return watched(original(*args, **kwargs))

    return get_rollout_class


def watched(rollout: type) -> type:
    """A rollout class whose first syncs are recorded."""

    class Watched(rollout):
        async def update_weights(self, sent, **kwargs):
            self.syncs = getattr(self, "syncs", 0) + 1
            if self.syncs > int(os.environ.get(WATCH_SYNCS, "0")):
                return await super().update_weights(sent, **kwargs)
            watch = Sync(self.syncs, model_of(self))
            result = await super().update_weights(watch.passing(sent), **kwargs)
            watch.finish(Path(os.environ[WATCH_FOLDER]) / f"worker-{rank()}.jsonl")
            return result

    Watched.__name__, Watched.__qualname__ = rollout.__name__, rollout.__qualname__
    return Watched


class Sync:
    """One weight sync of one worker."""

    def __init__(self, number: int, model: torch.nn.Module | None):
        self.number, self.model, self.sent = number, model, {}
        self.before = weights.table(aliases.weights(model).items()) if model is not None else {}
        self.derived = aliases.derivations(model) if model is not None else []

    def passing(self, sent):
        """Digest `(name, tensor)` pairs on their way, as the rollout will hold them."""
        targets = aliases.weights(self.model) if self.model is not None else {}
        for name, tensor in sent:
            kept = tensor.to(targets[name].dtype) if name in targets else tensor
            self.sent[name] = weights.entry(kept)
            yield name, tensor

    def finish(self, file: Path) -> None:
        """Record the sync; a warning for each derived tensor that it left behind."""
        stale = [str(known) for known in (aliases.stale(self.model, self.derived) if self.model is not None else [])]
        after = weights.table(aliases.weights(self.model).items()) if self.model is not None else {}
        weights.append(
            file, {"sync": self.number, "sent": self.sent, "before": self.before, "after": after, "stale": stale}
        )
        for sentence in stale:
            print(f"warning: sync {self.number}: {sentence} and was not updated with it", flush=True)


def model_of(rollout) -> torch.nn.Module | None:
    """The rollout's model, if it lives in this process."""
    if isinstance(model := getattr(rollout, "model", None), torch.nn.Module):
        return model
    worker = getattr(getattr(rollout, "inference_engine", None), "worker", None)
    return getattr(getattr(worker, "model_runner", None), "model", None)


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


patches.apply("sync-watch")
