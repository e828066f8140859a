"""What every verl process of a run with `deterministic: true` loads, last, before its first operator."""

from __future__ import annotations

from atlasrl import determinism

determinism.settle()
