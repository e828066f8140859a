"""Tensors under the names two checkpoints can share: one expert, one matrix, BF16 or FP8 with its scales.

Fused experts (transformers 5: `experts.gate_up_proj` [experts, 2·inner, hidden]) become views of one expert each, and
`experts.gate_proj.weight7` (a known export defect, verl#4338) is the expert 7 it means. A view is a range of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt_tools.checkpoint import Checkpoint
from ckpt_tools.checksum import PIECE, read_exactly
from ckpt_tools.errors import Fault
from ckpt_tools.families import SCALE_SUFFIX
from ckpt_tools.formats import E4M3, widen
from ckpt_tools.header import BITS, Header, Tensor, element_count
from ckpt_tools.plan import Span, span_of
from ckpt_tools.quantization import block_of, quantization_of

FUSED = re.compile(r"^(?P<stem>.+\.experts)\.(?P<part>gate_up_proj|down_proj)(?:\.weight)?$")
NUMBER_LAST = re.compile(r"^(?P<stem>.+\.experts)\.(?P<part>\w+)\.weight(?P<expert>\d{1,6})$")
NUMPY = {
    **{"F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"},
    **{"U64": "<u8", "U32": "<u4", "U16": "<u2"},
}


@dataclass(frozen=True, slots=True)
class View:
    """A tensor, or a part of a fused one, in a file of a folder. `scale` and `block` are set for quantised FP8."""

    folder: Path
    span: Span
    scale: Span | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def dtype(self) -> str:
        """What the values are once they are read: FP8 with scales counts as BF16."""
        return "BF16" if self.scale else self.span.dtype

    @property
    def rows(self) -> int:
        """The shape is taken as a matrix; a vector is one row."""
        shape = self.span.shape
        return shape[0] if len(shape) > 1 else 1

    @property
    def columns(self) -> int:
        return element_count(self.span.shape) // max(1, self.rows)


def views_of(checkpoint: Checkpoint) -> tuple[dict[str, View], dict[str, str]]:
    """All tensors of a checkpoint by shared name, and which shared names were spelled otherwise (shared -> stored)."""
    views: dict[str, View] = {}
    renamed: dict[str, str] = {}
    scales = {
        name: span_of(header, tensor)
        for header in checkpoint.headers.values()
        for name, tensor in header.tensors.items()
        if name.endswith(SCALE_SUFFIX)
    }
    block = block_of(checkpoint.config) if scales and quantization_of(checkpoint.config) else (1, 1)
    for header in checkpoint.headers.values():
        for name, tensor in header.tensors.items():
            if name in scales:
                continue
            scale = scales.get(name + SCALE_SUFFIX) if tensor.dtype == "F8_E4M3" else None
            for shared, span in _parts(name, header, tensor):
                if shared in views:
                    raise Fault(f"{checkpoint.path}: {shared} is there twice, also as {name}; run `ckpt verify`")
                views[shared] = View(checkpoint.path, span, scale, block if scale else (1, 1))
                if shared != name:
                    renamed[shared] = name
    return views, renamed


def _parts(name: str, header: Header, tensor: Tensor) -> Iterator[tuple[str, Span]]:
    span = span_of(header, tensor)
    if match := NUMBER_LAST.match(name):
        yield f"{match['stem']}.{int(match['expert'])}.{match['part']}.weight", span
        return
    match = FUSED.match(name)
    if not match or len(tensor.shape) != 3 or tensor.dtype == "F8_E4M3":
        yield name, span
        return
    experts, rows, columns = tensor.shape
    names = ["gate_proj", "up_proj"] if match["part"] == "gate_up_proj" else ["down_proj"]
    part_rows = rows // len(names)
    size = part_rows * columns * BITS[tensor.dtype] // 8
    for expert in range(experts):
        for position, part in enumerate(names):
            begin = span.begin + (expert * len(names) + position) * size
            shared = f"{match['stem']}.{expert}.{part}.weight"
            yield shared, Span(span.file, begin, begin + size, span.dtype, (part_rows, columns))


def row_groups(one: View, other: View) -> Iterator[tuple[int, int]]:
    """Ranges of rows to read at a time from both: about one piece."""
    widest = max(BITS[one.span.dtype], BITS[other.span.dtype]) // 8 or 1
    count = max(1, PIECE // (max(1, one.columns) * widest))
    for first in range(0, one.rows, count):
        yield first, min(one.rows, first + count)


def read_rows(view: View, descriptors: dict[tuple[Path, str], int], first: int, last: int) -> np.ndarray:
    """The stored bytes of some rows: uint8 [n]."""
    row_bytes = view.span.nbytes // max(1, view.rows)
    data = np.empty((last - first) * row_bytes, np.uint8)
    read_exactly(descriptors[view.folder, view.span.file], data, view.span.begin + first * row_bytes, view.span.file)
    return data


def decode(view: View, data: np.ndarray, scales: np.ndarray | None, first: int, last: int) -> np.ndarray:
    """The values of some rows as float32 (float64 for wide types): [rows · columns]."""
    dtype = view.span.dtype
    if dtype == "F8_E4M3":
        from ckpt_tools.kernels import dequantise_into

        if scales is None:
            return E4M3[data]
        values = np.empty((last - first, view.columns), np.uint16)
        dequantise_into(data.reshape(values.shape), first, scales, view.block[0], view.block[1], values)
        return widen(values.reshape(-1), "BF16")
    if dtype in ("BF16", "F16", "F32"):
        return widen(data, dtype)
    return data.view(NUMPY.get(dtype, "u1")).astype(np.float64, copy=False)
