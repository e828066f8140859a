"""The header of a safetensors file, read without its data and checked as hostile input.

Format (safetensors README): 8 bytes little-endian header length N, N bytes of JSON, then the data. The JSON maps a
tensor's name to `{"dtype", "shape", "data_offsets": [begin, end]}`, offsets counted from the first data byte, and
`__metadata__` to a flat map of strings. Every data byte belongs to exactly one tensor.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools.errors import Fault

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
MAX_HEADER = 100_000_000
"""The reference reader refuses longer headers (safetensors `tensor.rs`, MAX_HEADER_SIZE)."""

_OVERFLOW = 1 << 64
_SURROGATE = re.compile(rb"\\u[dD][89a-bA-B]")
"""JSON can spell half a character, which no file or terminal can hold; only then is a second look needed."""


class HeaderFault(Fault):
    """A file that is no intact safetensors file. `kind` is the finding's name in reports."""

    def __init__(self, kind: str, path: Path, problem: str, remedy: str):
        super().__init__(f"{path}: {problem}; {remedy}")
        self.kind, self.path, self.problem, self.remedy = kind, path, problem, remedy

    def __reduce__(self):
        return HeaderFault, (self.kind, self.path, self.problem, self.remedy)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a header; `begin` and `end` count bytes from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """What a shard says about itself; `metadata` is None when the header has no `__metadata__`."""

    path: Path
    length: int
    file_size: int
    metadata: dict[str, str] | None
    tensors: dict[str, Tensor]

    @property
    def data_start(self) -> int:
        return 8 + self.length

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data."""
        return self.file_size - self.data_start


def parse_json(text: bytes, where: str) -> tuple[object, list[str]]:
    """Parse JSON and also return the keys that occur twice in one object (plain `json` keeps the last silently).

    Raises:
        ValueError: not JSON, not UTF-8, or nested beyond reason; the message names `where`.
    """
    repeated: list[str] = []

    def collect(pairs: list[tuple[str, object]]) -> dict:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            repeated.extend(key for key, _ in pairs if key in seen or seen.add(key))
        return result

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=collect)
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content, repeated
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({type(error).__name__}: {str(error)[:120]})") from None


def _parse_quickly(text: bytes) -> tuple[dict, list[str]] | None:
    """Parse a header whose plain look rules out repeated keys, at half the cost of looking for them.

    Each tensor spells each of its three keys once, so that a repeated name or key shows as a surplus. In every case of
    doubt the result is None, and `parse_json` decides.
    """
    if b"\\" in text or text.count(b'"__metadata__"') > 1:
        return None
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    tensors = len(content) - ("__metadata__" in content)
    keys = (b'"dtype"', b'"shape"', b'"data_offsets"')
    return (content, []) if all(text.count(key) == tensors for key in keys) else None


def element_count(shape: Sequence[int]) -> int:
    """Product of a shape: 1 for a scalar, 0 for an empty tensor, 2^64 for everything that overflows 64 bits.

    The reference reader multiplies from the left and refuses an overflow, even when a zero follows.
    """
    count = 1
    for length in shape:
        count *= length
        if count >= _OVERFLOW:
            return _OVERFLOW
    return count


def expected_bytes(dtype: str, shape: Sequence[int]) -> int:
    return (element_count(shape) * BITS[dtype] + 7) // 8


def _are_sizes(values: object) -> bool:
    """True for a list of integers that fit in 64 bits unsigned. Called 200,000 times for one large model."""
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110 (a generator costs three times as much)
        if type(value) is not int or not 0 <= value < _OVERFLOW:
            return False
    return True


def _tensor(name: str, entry: object) -> Tensor:
    """Build one tensor from its JSON entry. Raises ValueError with the reason."""
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        raise ValueError(f"tensor {name!r} has a shape that is no list of sizes: {str(shape)[:60]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has data_offsets that are no pair of sizes: {str(offsets)[:60]}")
    wanted = expected_bytes(dtype, shape)
    if offsets[1] - offsets[0] != wanted:
        problem = f"{wanted} bytes, its offsets span {offsets[1] - offsets[0]}"
        raise ValueError(f"tensor {name!r} is {dtype} {str(shape)[:60]}: {problem}")
    return Tensor(name, dtype, tuple(shape), offsets[0], offsets[1])


def parse_header(text: bytes, path: Path, file_size: int) -> Header:
    """Parse the JSON part of a header and check it against the size of the file.

    Raises:
        HeaderFault: the text is no header, tensors overlap or leave holes, or the file is too short or too long.
    """

    def fault(kind: str, problem: str, remedy: str = "download or write this shard again") -> HeaderFault:
        return HeaderFault(kind, path, problem, remedy)

    try:
        content, repeated = _parse_quickly(text) or parse_json(text, "its header")
    except ValueError as error:
        raise fault("bad_header", str(error)) from None
    if repeated:
        raise fault("duplicate_key", f"its header lists {repeated[0]!r} twice")
    if not isinstance(content, dict):
        raise fault("bad_header", "its header is not a JSON object")
    metadata = content.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise fault("bad_header", "its __metadata__ is not a map of strings")
    try:
        tensors = {name: _tensor(name, entry) for name, entry in content.items()}
    except ValueError as error:
        raise fault("bad_header", str(error)) from None

    position, previous = 0, None
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if tensor.begin < position:
            raise fault("overlap", f"tensors {previous!r} and {tensor.name!r} overlap in the data")
        if tensor.begin > position:
            raise fault("hole", f"{tensor.begin - position} data bytes before {tensor.name!r} belong to no tensor")
        position, previous = tensor.end, tensor.name
    expected = 8 + len(text) + position
    if file_size < expected:
        problem = f"{file_size} bytes found, {expected} expected: the file is truncated, a copy or download broke off"
        raise fault("truncated", problem)
    if file_size > expected:
        problem = f"{file_size} bytes found, {expected} expected: {file_size - expected} bytes follow the last tensor"
        raise fault("trailing_bytes", problem)
    return Header(path, len(text), file_size, metadata, tensors)


def _explain_start(path: Path, start: bytes, file_size: int) -> HeaderFault | None:
    """Name the usual things that are found where a shard should be."""
    again = "download or write this shard again"
    if file_size == 0:
        return HeaderFault("empty_file", path, "0 bytes found: the disk was full or a copy never started", again)
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"size (\d{1,20})", start)
        expected = f", {size[1].decode()} expected" if size else ""
        problem = f"{file_size} bytes found{expected}: this is a git-lfs pointer, not the file it points to"
        return HeaderFault("lfs_pointer", path, problem, "run `git lfs pull` in its repository and copy again")
    if start.lstrip()[:1] == b"<":
        problem = "it starts like HTML: a login or error page was saved as the file"
        return HeaderFault("not_safetensors", path, problem, again)
    if file_size < 10:
        return HeaderFault("truncated", path, f"{file_size} bytes found: too short for a header", again)
    return None


def read_header(path: Path) -> Header:
    """Read and check the header of one file; reads 8 + N bytes, no data.

    Raises:
        HeaderFault: what the file is instead of an intact safetensors file, with found and expected sizes.
    """
    try:
        with path.open("rb", buffering=0) as file:
            file_size = os.fstat(file.fileno()).st_size
            start = os.pread(file.fileno(), min(file_size, 256), 0)
            if fault := _explain_start(path, start, file_size):
                raise fault
            length = int.from_bytes(start[:8], "little")
            if length > MAX_HEADER:
                problem = f"its header claims {length} bytes: this is no safetensors file, or its start is overwritten"
                raise HeaderFault("not_safetensors", path, problem, "download or write this shard again")
            if 8 + length > file_size:
                problem = f"{file_size} bytes found, at least {8 + length} expected: cut inside its header"
                raise HeaderFault("truncated", path, problem, "download or write this shard again")
            text = start[8 : 8 + length]
            while len(text) < length and (more := os.pread(file.fileno(), length - len(text), 8 + len(text))):
                text += more
    except OSError as error:
        raise HeaderFault("unreadable", path, error.strerror or str(error), "check the path and its rights") from None
    return parse_header(text, path, file_size)


def header_bytes(tensors: list[Tensor], metadata: dict[str, str]) -> bytes:
    """Write a header: length, then JSON padded with spaces so that the data starts on a multiple of 8."""
    content: dict[str, object] = {"__metadata__": metadata}
    for tensor in tensors:
        content[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
