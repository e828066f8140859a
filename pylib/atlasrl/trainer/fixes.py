"""This project's fixes of upstream code as data: what a plan lists and what lint and doctor count on. Pure."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from atlasrl.trainer import megatron_patches, npu_patches, other_layout, patches, verl_patches

if TYPE_CHECKING:
    from atlasrl.recipe import Recipe
    from atlasrl.stacks import Stack


@functools.cache
def declared() -> dict[str, dict]:
    """Every fix that mends a fault of upstream, by id: reason, upstream, package, versions, targets."""
    ids = (*verl_patches.PATCHES, *npu_patches.PATCHES, *megatron_patches.PATCHES, *other_layout.PATCHES)
    return {fix["id"]: fix for fix in patches.listing(*ids)}


def lines(recipe: Recipe, stack: Stack, environment) -> list[str]:
    """One line for each fix of a run: what it mends, or why it is left out."""
    ids = [*verl_patches.PATCHES]
    if recipe.device == "npu" and recipe.rollout.engine == "vllm":
        ids += npu_patches.PATCHES
    if recipe.backend == "megatron":
        ids += (*megatron_patches.PATCHES, *other_layout.PATCHES)
    off = patches.switched_off(environment)
    return [_line(declared()[id], stack, id in off) for id in ids]


def _line(fix: dict, stack: Stack, off: bool) -> str:
    package, versions = fix["package"], fix["versions"]
    if off:
        return f"{fix['id']}: left out, {patches.WITHOUT} names it; {fix['reason']}"
    if not stack.within(package, versions):
        return f"{fix['id']}: not for {package} {stack.version(package)}, it mends {versions}"
    return f"{fix['id']}: {fix['reason']} [{fix['upstream']}]"
