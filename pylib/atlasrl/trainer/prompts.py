"""An endless, resumable stream of prompts whose order depends on the seed alone.

verl's StatefulDataLoader ends at an epoch boundary: a run resumed exactly there exits 0 without a step (verl #5725).
Here an epoch is only a number in the state, which is small and readable.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atlasrl.errors import Fault


@dataclass(frozen=True)
class Prompt:
    """One row of the dataset, drawn."""

    id: str
    """`<row>:<digest of its content>`: the same id means the same prompt with the same right answer."""
    row: dict


class PromptSource:
    """Draws rows of `dataset` (indexable, sized) epoch by epoch.

    Args:
        dataset: rows as verl's RLHFDataset yields them.
        digest: identifies the data; a checkpoint of other data is refused.
        seed: with the epoch's number it decides the order.
        shuffle: False draws rows in file order.
    """

    def __init__(self, dataset, *, digest: str, seed: int, shuffle: bool):
        if len(dataset) == 0:
            raise Fault(
                "the training data holds no prompt that fits data.max_prompt_tokens; raise it or check the file"
            )
        self.dataset, self.digest, self.seed, self.shuffle = dataset, digest, seed, shuffle
        self.epoch = self.position = 0
        self._order = self._permutation()

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; an epoch's end is no boundary."""
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "position": self.position, "rows": len(self.dataset), "dataset": self.digest}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state` was taken.

        Raises:
            Fault: the state belongs to other data.
        """
        if (state.get("dataset"), state.get("rows")) != (self.digest, len(self.dataset)):
            raise Fault(
                f"the checkpoint was trained on data {state.get('dataset')} ({state.get('rows')} prompts), this is "
                f"{self.digest} ({len(self.dataset)} prompts): resume with the same data.train, or start a new run"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._permutation()

    def _next(self) -> Prompt:
        if self.position == len(self.dataset):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._permutation()
        index = int(self._order[self.position])
        self.position += 1
        row = self.dataset[index]
        return Prompt(f"{index}:{content_digest(row)}", row)

    def _permutation(self) -> np.ndarray:
        rows = len(self.dataset)
        return np.random.default_rng([self.seed, self.epoch]).permutation(rows) if self.shuffle else np.arange(rows)


def content_digest(row: dict) -> str:
    """Twelve hex digits of what is asked and what is right."""
    asked = json.dumps([row.get("raw_prompt"), row.get("reward_model")], sort_keys=True, default=str)
    return hashlib.sha256(asked.encode()).hexdigest()[:12]


def files_digest(files: list[str]) -> str:
    """Sixteen hex digits of the bytes of all files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        with Path(file).open("rb") as handle:
            while chunk := handle.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()[:16]
