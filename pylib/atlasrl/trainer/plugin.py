"""What every verl process of a run loads, named in VERL_USE_EXTERNAL_MODULES: applies the fixes for any device."""

from __future__ import annotations

from atlasrl.trainer import npu_patches, patches, verl_patches

patches.apply(*verl_patches.PATCHES, *npu_patches.PATCHES)
