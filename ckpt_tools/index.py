"""The index of a sharded checkpoint: which tensor lies in which file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools.errors import Fault
from ckpt_tools.header import Header, parse_json

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Index:
    """`weight_map` in file order. `repeated` names keys listed twice, of which JSON readers keep the last."""

    path: Path
    weight_map: dict[str, str]
    metadata: dict[str, object] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()

    def files(self) -> list[str]:
        """The shards it names, in order of first mention."""
        return list(dict.fromkeys(self.weight_map.values()))


def parse_index(text: bytes, path: Path) -> Index:
    """Parse an index.

    Raises:
        Fault: it is no JSON object with a `weight_map` of strings.
    """
    remedy = "rebuild it from the shards with `ckpt repair --rebuild-index`"
    try:
        content, repeated = parse_json(text, "the index")
    except ValueError as error:
        raise Fault(f"{path}: {error}; {remedy}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise Fault(f"{path}: the index has no weight_map from tensor names to file names; {remedy}")
    metadata = content.get("metadata", {})
    if not isinstance(metadata, dict):
        raise Fault(f"{path}: the index's metadata is not an object; {remedy}")
    return Index(path, weight_map, metadata, tuple(repeated))


def find_index(folder: Path) -> Path | None:
    """The folder's index: the usual name, or the only file named like one (diffusers, variants)."""
    usual = folder / INDEX_NAME
    if usual.exists():
        return usual
    others = sorted(folder.glob("*.safetensors.index.json"))
    return others[0] if len(others) == 1 else None


def read_index(folder: Path) -> Index | None:
    """Read the folder's index, None when it has none. Raises Fault when it cannot be read or parsed."""
    path = find_index(folder)
    if path is None:
        return None
    try:
        return parse_index(path.read_bytes(), path)
    except OSError as error:
        raise Fault(f"{path}: {error.strerror}; check the file and its rights") from None


def index_of(headers: list[Header], metadata: dict[str, object] | None = None) -> dict:
    """Assemble the JSON content of an index from shards as they are.

    Args:
        headers: the shards; each tensor must lie in exactly one.
        metadata: what an older index said; `total_size` is always recomputed.
    """
    weight_map = {name: header.path.name for header in headers for name in header.tensors}
    total = sum(header.nbytes for header in headers)
    return {"metadata": {**(metadata or {}), "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def index_text(content: dict) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
