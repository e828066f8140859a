"""One verl (hydra) setting and why it has its value."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """`key` carries the hydra prefix it needs: `++` where verl's YAML has no such key."""

    key: str
    value: bool | int | float | str | list | dict | None
    reason: str

    def __str__(self) -> str:
        """The override in hydra's grammar, quoted so that any path or text survives."""
        return f"{self.key}={hydra_text(self.value)}"


def hydra_text(value) -> str:
    """A value in hydra's override grammar.

    >>> hydra_text(["a b", None, True, 1e-6])
    "['a b',null,true,1e-06]"
    """
    if isinstance(value, str):
        # Backslashes only need care before a quote or at the end (hydra 1.3, "Escaping").
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'" if _needs_care(value) else f"'{value}'"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_text(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _needs_care(text: str) -> bool:
    return "'" in text or text.endswith("\\")
