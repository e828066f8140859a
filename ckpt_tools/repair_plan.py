"""What a repair would change, decided from headers, index and config: pure functions.

Only what the shards prove is changed. A tensor that the index lists and no shard holds may be dropped when nothing
trains it (a buffer, an MTP layer that is off, a scale without FP8) or when a pattern names it; else it is lost, and
no repair can bring it back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_tools import families
from ckpt_tools.checkpoint import SHARD_NAME, Checkpoint
from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.header import Header, Tensor, element_count, header_bytes
from ckpt_tools.index import INDEX_NAME, index_of, index_text
from ckpt_tools.report import Report
from ckpt_tools.verify import check_model, check_quantization

NEEDED = "held by no shard and needed; copy the shard again, or name it with --drop if it is not"


@dataclass(frozen=True, slots=True)
class ShardEdit:
    """How one shard of the repaired checkpoint comes about: linked as it is, or written anew with these tensors."""

    source: Header
    file: str
    tensors: tuple[Tensor, ...]
    header: bytes | None
    """None: the file is taken over as it is. Else what to write before the tensors' bytes."""


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """All files that differ afterwards; `changes` says so in words, one line each."""

    folder: Path
    shards: tuple[ShardEdit, ...]
    removed: tuple[str, ...]
    texts: dict[str, str]
    """New content of index and config, by file name."""
    changes: tuple[str, ...]
    remaining: Report = field(default_factory=lambda: Report(""))
    """What would still be wrong afterwards, and is not a repair's to mend."""

    @property
    def moves_shards(self) -> bool:
        return bool(self.removed) or any(edit.header or edit.file != edit.source.path.name for edit in self.shards)

    @property
    def written_bytes(self) -> int:
        return sum(len(edit.header) + sum(t.nbytes for t in edit.tensors) for edit in self.shards if edit.header)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user allows beyond the proven: patterns to drop, buffers to keep, the MTP layer off, a new index."""

    drop: tuple[re.Pattern, ...] = ()
    keep: tuple[re.Pattern, ...] = ()
    drop_mtp: bool = False
    rebuild_index: bool = False


def compile_patterns(texts: tuple[str, ...]) -> tuple[re.Pattern, ...]:
    """Compile --drop and --keep patterns. Raises UsageFault for one that is no regular expression."""
    try:
        return tuple(re.compile(text) for text in texts)
    except re.error as error:
        raise UsageFault(f"pattern {error.pattern!r} is no regular expression: {error}") from None


def drop_reason(name: str, held: bool, config: dict, quantised: bool, wishes: Wishes) -> str | None:
    """Why a key leaves the checkpoint, None when it stays."""
    if any(pattern.search(name) for pattern in wishes.keep):
        return None
    if any(pattern.search(name) for pattern in wishes.drop):
        return "named by --drop"
    if families.is_mtp(name, config) and (wishes.drop_mtp or (not held and not families.mtp_layers(config))):
        return "MTP layer"
    if name.endswith(families.SCALE_SUFFIX) and not quantised:
        return "FP8 scale in a checkpoint without FP8 weights"
    if held:
        return None
    if families.STALE_BUFFER.search(name):
        return "buffer the model computes itself, held by no shard"
    if name == "lm_head.weight" and families.is_tied(config):
        return "tied to the embedding, held by no shard"
    return None


def plan_repair(checkpoint: Checkpoint, wishes: Wishes) -> RepairPlan:
    """Plan the repair of a checkpoint.

    Raises:
        UsageFault: a pattern asks to keep a key that no shard holds.
        Fault: shards are broken or lost, a tensor lies in two shards, or the index is lost and was not asked for.
    """
    _refuse_the_unprovable(checkpoint, wishes)
    listed = checkpoint.index.weight_map if checkpoint.index else {}
    locations, config = checkpoint.locations(), checkpoint.config
    quantised = any(tensor.dtype == "F8_E4M3" for tensor in checkpoint.tensors().values())
    changes: list[str] = []
    dropped: set[str] = set()
    for name in {**listed, **locations}:
        held = locations.get(name)
        if reason := drop_reason(name, bool(held), config, quantised, wishes):
            dropped.add(name)
            changes.append(f"drop {name}: {reason}")
        elif not held:
            raise Fault(f"{name}: listed in the index for {listed[name]}, {NEEDED}")
        elif len(held) > 1:
            raise Fault(f"{name}: lies in {' and '.join(held)}; which one is right cannot be proven, remove one file")
        elif name not in listed:
            changes.append(f"list {name} in {held[0]}")
        elif listed[name] != held[0]:
            changes.append(f"list {name} in {held[0]} instead of {listed[name]}")
    edits, removed = _edit_shards(checkpoint, dropped, changes)
    headers = [_header_after(checkpoint.path, edit) for edit in edits]
    texts: dict[str, str] = {}
    new_config = config
    if wishes.drop_mtp and families.mtp_layers(config):
        new_config = {**config, "num_nextn_predict_layers": 0}
        texts["config.json"] = index_text(new_config)
        changes.append("config.json: num_nextn_predict_layers 0")
    index_name = checkpoint.index.path.name if checkpoint.index else INDEX_NAME
    content = _new_index(checkpoint, headers, changes)
    if checkpoint.index is None or changes:
        texts[index_name] = index_text(content)
    outcome = Checkpoint(checkpoint.path, None, {header.path.name: header for header in headers}, {}, new_config)
    remaining = Report(str(checkpoint.path))
    check_model(outcome, remaining)
    check_quantization(outcome, remaining)
    return RepairPlan(checkpoint.path, edits, removed, texts, tuple(changes), remaining)


def _refuse_the_unprovable(checkpoint: Checkpoint, wishes: Wishes) -> None:
    for fault in checkpoint.broken.values():
        raise Fault(f"{fault}; what it held cannot be proven, nothing was changed")
    if not checkpoint.headers:
        raise Fault(f"{checkpoint.path}: no intact shard; copy the shards first")
    numbered = [match for file in checkpoint.headers if (match := SHARD_NAME.fullmatch(file))]
    if checkpoint.index is None or not checkpoint.index.weight_map:
        if not wishes.rebuild_index and len(checkpoint.headers) > 1:
            raise Fault(f"{checkpoint.path}: the index is lost; `--rebuild-index` assembles it from the shards")
        counts = {int(match["count"][:9]) for match in numbered}
        if numbered and (len(numbered) != len(checkpoint.headers) or counts != {len(numbered)}):
            raise Fault(
                f"{checkpoint.path}: {len(checkpoint.headers)} shards, numbered 'of {max(counts)}'; without an index "
                "nothing proves that none is missing: copy all of one save"
            )


def _edit_shards(checkpoint, dropped, changes) -> tuple[tuple[ShardEdit, ...], tuple[str, ...]]:
    kept: list[tuple[Header, tuple[Tensor, ...], bool]] = []
    removed = []
    for file in sorted(checkpoint.headers):
        header = checkpoint.headers[file]
        stay = sorted((t for t in header.tensors.values() if t.name not in dropped), key=lambda t: t.begin)
        if not stay:
            removed.append(file)
            changes.append(f"remove {file}: no tensor is left in it")
            continue
        bare = not (header.metadata or {}).get("format")
        if bare:
            changes.append(f"{file}: header gets format pt")
        if len(stay) < len(header.tensors):
            changes.append(f"{file}: written without {len(header.tensors) - len(stay)} tensors")
        kept.append((header, tuple(stay), bare or len(stay) < len(header.tensors)))
    numbered = all(SHARD_NAME.fullmatch(header.path.name) for header, _, _ in kept)
    edits = []
    for number, (header, tensors, rewrite) in enumerate(kept, 1):
        file = header.path.name
        if removed and numbered:
            match = SHARD_NAME.fullmatch(file)
            file = f"{match['stem']}-{number:05d}-of-{len(kept):0{len(match['count'])}d}.safetensors"
            if file != header.path.name:
                changes.append(f"rename {header.path.name} to {file}")
        metadata = {**(header.metadata or {}), "format": (header.metadata or {}).get("format") or "pt"}
        text = header_bytes(_packed(tensors), metadata) if rewrite else None
        edits.append(ShardEdit(header, file, tensors, text))
    return tuple(edits), tuple(removed)


def _packed(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors one after the other, without the holes that dropped ones left."""
    packed, position = [], 0
    for tensor in tensors:
        packed.append(Tensor(tensor.name, tensor.dtype, tensor.shape, position, position + tensor.nbytes))
        position += tensor.nbytes
    return packed


def _header_after(folder: Path, edit: ShardEdit) -> Header:
    tensors = {tensor.name: tensor for tensor in _packed(edit.tensors)}
    length = len(edit.header) - 8 if edit.header else edit.source.length
    size = 8 + length + sum(tensor.nbytes for tensor in tensors.values())
    return Header(folder / edit.file, length, size, {"format": "pt"}, tensors)


def _new_index(checkpoint: Checkpoint, headers: list[Header], changes: list[str]) -> dict:
    """The index of the repaired shards; adds a line for what it corrects."""
    old = checkpoint.index
    metadata = dict(old.metadata) if old else {}
    if "total_parameters" in metadata:
        metadata["total_parameters"] = sum(element_count(t.shape) for h in headers for t in h.tensors.values())
    content = index_of(headers, metadata)
    if old is None:
        changes.append("write a new index from the shards")
        return content
    for name in old.repeated:
        changes.append(f"index: list {name} once")
    if old.metadata.get("total_size") != content["metadata"]["total_size"]:
        changes.append(f"index: total_size {old.metadata.get('total_size')} -> {content['metadata']['total_size']}")
    return content
