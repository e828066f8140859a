"""verl on a machine without an accelerator. Named in VERL_USE_EXTERNAL_MODULES, so that every verl process loads it."""

from __future__ import annotations

from atlasrl.trainer import patches, plugin  # noqa: F401  (applies the fixes for any device)
from atlasrl.trainer.cpu import device

patches.apply(*device.PATCHES)
