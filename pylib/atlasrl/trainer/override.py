"""One verl (hydra) setting and why it has its value."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

BEFORE_QUOTE = re.compile(r"(\\*)('|\Z)")
"""Backslashes before a quote or the end: the only ones that hydra takes for escapes (hydra 1.3, quoted values)."""


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
        return "'" + BEFORE_QUOTE.sub(lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value) + "'"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_text(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)
