"""A checkpoint of Megatron's optimizer, loaded into another split of the model than the one that saved it.

Megatron-core stores the state of its distributed optimizer by parameter, so that any split can read its part of it.
Two things stand in the way: with expert parallelism the optimizer is a chain of two, one for the experts, and the names
of its tensors say so; and random states are stored by stage and tensor rank. The weights come from Hugging Face
tensors, which know of no split.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator

from atlasrl.errors import Fault
from atlasrl.trainer.patches import patch

PATCHES = ("other-layout",)
LINK = re.compile(r"chained_\d+\.")
KIND = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""What tells parameter groups apart, beside the experts."""

log = logging.getLogger(__name__)


@patch(
    id="other-layout",
    reason="a checkpoint of one split cannot be loaded into another: the optimizer's tensors are named after whether "
    "the experts have an optimizer of their own, random states after the pipeline and tensor sizes",
    upstream="megatron-core 0.12.1 ChainedOptimizer.sharded_state_dict; verl 0.7.0 get_rng_state",
    package="verl",
    versions=">=0.7.0,<0.8",
    target="verl.utils.checkpoint.megatron_checkpoint_manager:load_dist_checkpointing",
    expects="dist_checkpointing.load(sharded_state_dict",
)
def into_this_layout(original):
    def load_dist_checkpointing(sharded_state_dict, ckpt_dir):
        wanted, saved = dict(sharded_state_dict), _saved_names(ckpt_dir)
        own, kept = None, {}
        if (state := wanted.get("rng_state")) is not None and state.unique_key not in saved:
            log.warning(
                "%s was saved by another split: random states stay as they are; nothing draws from them", ckpt_dir
            )
            kept["rng_state"] = wanted.pop("rng_state").data
        if (optimizer := wanted.get("optimizer")) and is_chain(optimizer) != any(map(LINK.match, saved)):
            own, wanted["optimizer"] = optimizer, {}
            wanted["own"] = {i: part.get("param_state") for i, part in enumerate(parts(own))}
            rename(wanted["own"].values(), saved)
        loaded = original(wanted, ckpt_dir) | kept
        if own is not None:
            loaded["optimizer"] = assembled(own, loaded.pop("own"), loaded["optimizer"])
        return loaded

    return load_dist_checkpointing


def _saved_names(folder: str) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def is_chain(optimizer: dict) -> bool:
    """Whether this is the state of several optimizers, by their number."""
    return 0 in optimizer


def parts(optimizer: dict) -> list[dict]:
    """The state of each optimizer of a chain, or of the only one."""
    return [optimizer[i] for i in range(len(optimizer))] if is_chain(optimizer) else [optimizer]


def rename(states: Iterable[dict | None], saved: set[str]) -> None:
    """Give the tensors that shall be loaded the names that they were saved under.

    Raises:
        Fault: a tensor was not saved at all, or the optimizer is not the distributed one.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    links = sorted({match.group() for name in saved if (match := LINK.match(name))}) or [""]
    for state in states:
        if state is None:
            raise Fault("only the distributed optimizer can load a checkpoint of another expert split; switch it on")
        for tensor in nested_values(state):
            if not isinstance(tensor, ShardedBase):
                continue
            name = LINK.sub("", tensor.key, count=1)
            found = next((link + name for link in links if link + name in saved), None)
            if found is None:
                raise Fault(f"the checkpoint holds no {name}; was it saved by another model?")
            tensor.key = found


def assembled(own: dict, tensors: dict[int, dict], saved: dict) -> dict:
    """The state that this process's optimizer loads: its own shape, the saved tensors and the saved options."""
    groups = [*_groups(saved)]
    states = [
        part
        | {"param_state": tensors[i]}
        | {"optimizer": part["optimizer"] | {"param_groups": [_like(group, groups) for group in _groups(part)]}}
        for i, part in enumerate(parts(own))
    ]
    return dict(enumerate(states)) if is_chain(own) else states[0]


def _groups(optimizer: dict) -> Iterator[dict]:
    for part in parts(optimizer):
        yield from part["optimizer"]["param_groups"]


def _like(group: dict, saved: list[dict]) -> dict:
    """The options of the saved group whose parameters are of this group's kind.

    Raises:
        Fault: there is none.
    """
    for each in saved:
        if all(each.get(key) == group.get(key) for key in KIND):
            return {**each, "is_expert_parallel": group.get("is_expert_parallel")}
    kind = ", ".join(f"{key} {group.get(key)}" for key in KIND)
    raise Fault(f"the checkpoint has no parameter group with {kind}; were the optimizer's settings changed?")
