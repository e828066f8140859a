"""verl's Megatron backend on a machine without an accelerator.

Named in VERL_USE_EXTERNAL_MODULES after `atlasrl.trainer.cpu`, so that every verl process of a Megatron run loads it.
"""

from __future__ import annotations

from atlasrl.trainer import alarms, megatron_patches, other_layout, patches
from atlasrl.trainer.cpu import megatron_bridge, megatron_device

patches.apply(
    *megatron_patches.PATCHES,
    *other_layout.PATCHES,
    *alarms.PATCHES,
    *megatron_device.PATCHES,
    *megatron_bridge.PATCHES,
)
