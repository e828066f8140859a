"""Predict, from index and config, what mbridge 0.13.1 and 0.15.1 would not save, before a run starts.

`SafeTensorIO.save_hf_weight` writes a shard only when the trainer has yielded every key the index lists for it; one
key that is never yielded costs the whole shard, with no more than a warning (mbridge `core/safetensor_io.py`;
Megatron-Bridge#1838, mbridge#119). With `memory_efficient=True` the same index ends in FileNotFoundError instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools import families
from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.report import Report

BRIDGE_MTP_LAYERS = (1, 61)
"""mbridge yields MTP tensors only for 1 MTP layer behind 61 (`deepseek_v3.py`, `_convert_mtp_param`)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A shard that would not be written, or (file None) tensors that have no place in the index.

    `blocking` maps the keys that no trainer yields to the reason; `lost` are the trained tensors that go with them.
    """

    file: str | None
    blocking: dict[str, str]
    lost: tuple[str, ...]

    def __str__(self) -> str:
        if self.file is None:
            return f"{len(self.lost)} trained tensors are not in the index and never saved, first {self.lost[0]}"
        key, reason = next(iter(self.blocking.items()))
        lost = f"{len(self.lost)} trained tensors are lost with it" if self.lost else "it holds nothing else"
        return f"{self.file}: never saved, the index lists {len(self.blocking)} keys like {key} ({reason}); {lost}"


def never_yielded(name: str, config: dict) -> str | None:
    """Why no export of a trained model yields this key, or None when it does."""
    if families.STALE_BUFFER.search(name):
        return "a buffer, not a weight"
    if name.endswith(families.SCALE_SUFFIX):
        return "an FP8 scale, training is BF16"
    if families.is_mtp(name, config):
        mtp, layers = families.mtp_layers(config), families.layer_count(config)
        if mtp == 0:
            return "an MTP layer, off in config.json"
        if (mtp, layers) != BRIDGE_MTP_LAYERS:
            return f"an MTP layer behind {layers} layers; mbridge converts it behind 61 only"
    if name == "lm_head.weight" and families.is_tied(config):
        return "tied to the embedding"
    expected = families.expected_shapes(config) if families.layer_of(name) is None else None
    if expected is not None and name not in expected:
        return f"no tensor of a {config['model_type']} model"
    return None


def predict_unsaved(weight_map: Mapping[str, str], config: dict) -> list[Loss]:
    """Predict the shards and tensors that `save_hf_weight` would lose.

    Args:
        weight_map: tensor -> file, from the index of the checkpoint that training starts from.
        config: its config.json.

    Returns:
        losses in file order; empty when every tensor would be saved.

    Example:
        >>> config = {"model_type": "llama"}
        >>> shard = "model-00001-of-00001.safetensors"
        >>> index = {"a.weight": shard, "model.layers.0.self_attn.rotary_emb.inv_freq": shard}
        >>> [len(loss.lost) for loss in predict_unsaved(index, config)]
        [1]
    """
    blocked: dict[str, dict[str, str]] = {}
    members: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if reason := never_yielded(name, config):
            blocked.setdefault(file, {})[name] = reason
        else:
            members.setdefault(file, []).append(name)
    losses = [Loss(file, keys, tuple(members.get(file, ()))) for file, keys in sorted(blocked.items())]
    expected = families.expected_shapes(config) or {}
    homeless = tuple(n for n in expected if n not in weight_map and never_yielded(n, config) is None)
    return [*losses, Loss(None, {}, homeless)] if homeless else losses


def add_predictions(folder: Path, report: Report) -> None:
    """Add an error to a report for everything that mbridge would lose."""
    checkpoint = read_checkpoint(folder)
    if checkpoint.index is None:
        problem = "has no index; mbridge asserts one for memory_efficient saves and for every FP8-capable family"
        report.error("mbridge_unsaved", folder.name, problem, "run `ckpt repair --rebuild-index`")
        return
    for loss in predict_unsaved(checkpoint.index.weight_map, checkpoint.config):
        report.error("mbridge_unsaved", loss.file or folder.name, str(loss), "run `ckpt repair` (see --drop, --mtp)")
