"""What every verl process of a run loads, named in VERL_USE_EXTERNAL_MODULES: applies the fixes for any device."""

from __future__ import annotations

from atlasrl.trainer import patches, verl_patches  # noqa: F401  (declares the fixes)

patches.apply("tensorboard-purge", "tensorboard-flush", "file-logger", "no-rollout", "fsdp2-idle-experts")
