"""What every verl process of a Megatron run on NPU or GPU loads, named in VERL_USE_EXTERNAL_MODULES."""

from __future__ import annotations

from atlasrl.trainer import alarms, megatron_patches, other_layout, patches

patches.apply(*megatron_patches.PATCHES, *other_layout.PATCHES, *alarms.PATCHES)
