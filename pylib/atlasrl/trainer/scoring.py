"""verl's reward manager, with results that survive a dump: plain numbers, one per answer.

verl's DAPO manager reports `overlong_reward` as tensors and leaves columns ragged when a reward function returns its
keys only sometimes; dumping such a batch raises deep inside `fit` (json: Tensor is not serializable).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atlasrl.errors import Fault


class Scorer:
    """Calls `manager(batch, return_dict=True)` and makes its extra columns plain. A drop-in for verl's reward_fn."""

    def __init__(self, manager):
        self.manager = manager

    def __call__(self, batch, return_dict: bool = False):
        result = self.manager(batch, return_dict=True)
        if not return_dict:
            return result["reward_tensor"]
        extras = plain_columns(result.get("reward_extra_info", {}), len(batch))
        return {"reward_tensor": result["reward_tensor"], "reward_extra_info": extras}


def plain_columns(columns: Mapping[str, list], rows: int) -> dict[str, list]:
    """The columns as lists of bool, int, float, str or None.

    Raises:
        Fault: a column that does not have one value per answer.
    """
    for name, values in columns.items():
        if len(values) != rows:
            raise Fault(
                f"the reward function returned {name!r} for {len(values)} of {rows} answers; it must return the same "
                "keys for every answer"
            )
    return {name: [plain(value) for value in values] for name, values in columns.items()}


def plain(value):
    """A tensor or numpy scalar as its Python number."""
    if hasattr(value, "item") and getattr(value, "size", None) is not None:
        try:
            return value.item()
        except (RuntimeError, ValueError):
            return value.tolist()
    return value


def accuracies(extras: Mapping[str, np.ndarray], scores: np.ndarray) -> np.ndarray:
    """[answers] what dynamic sampling looks at: `acc` if the reward function reports it, else the final score."""
    return np.asarray(extras["acc"], float) if "acc" in extras else scores
