"""A checkpoint folder as it lies on disk: headers of all shards, index, config."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.files import is_plain_name
from ckpt_tools.header import Header, HeaderFault, Tensor, parse_json, read_header
from ckpt_tools.index import Index, read_index

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")

SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A folder as it lies on disk.

    `headers` holds the intact shards by file name, `broken` why the others are not, `strangers` files that no loader
    would read as part of this checkpoint (an adapter, another format's copy). `config` is {} without a config.json.
    """

    path: Path
    index: Index | None
    headers: dict[str, Header]
    broken: dict[str, HeaderFault]
    config: dict
    strangers: tuple[Header, ...] = ()

    @cached_property
    def _locations(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for file, header in self.headers.items():
            for name in header.tensors:
                found.setdefault(name, []).append(file)
        return found

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for header in self.headers.values() for name, tensor in header.tensors.items()}

    def locations(self) -> dict[str, list[str]]:
        """Which files hold each tensor, by their headers; more than one is a defect. Not to be changed."""
        return self._locations

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name; of a name that several shards hold, the last. Not to be changed."""
        return self._tensors

    @property
    def nbytes(self) -> int:
        return sum(header.nbytes for header in self.headers.values())


def read_config(folder: Path) -> dict:
    """Read config.json, {} when there is none. Raises Fault when it is not a JSON object."""
    path = folder / "config.json"
    if not path.exists():
        return {}
    try:
        config, repeated = parse_json(path.read_bytes(), "config.json")
    except (ValueError, OSError) as error:
        raise Fault(f"{path}: {error}; restore it from the model's origin") from None
    if repeated:
        raise Fault(f"{path}: lists {repeated[0]!r} twice, and readers keep the last silently; remove one")
    if not isinstance(config, dict):
        raise Fault(f"{path}: is not a JSON object; restore it from the model's origin")
    return config


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read every header of a folder, its index and its config; no tensor data.

    Raises:
        UsageFault: there is no such folder, or nothing in it is a safetensors checkpoint.
        Fault: index or config cannot be parsed. A broken shard is kept in `broken`, not raised.
    """
    if not folder.is_dir():
        raise UsageFault(f"{folder}: no such folder; give the folder that holds the *.safetensors files")
    index = read_index(folder)
    files = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith(".")}
    if index is not None:
        files |= {file for file in index.files() if is_plain_name(file) and (folder / file).exists()}
    if not files and index is None:
        raise UsageFault(f"{folder}: holds neither *.safetensors nor an index; give the folder of the checkpoint")
    members = member_files(files, index)
    headers, broken, strangers = {}, {}, []
    with _collector_paused():
        for file in sorted(files):
            try:
                header = read_header(folder / file)
            except HeaderFault as fault:
                broken[file] = fault
            else:
                if file in members:
                    headers[file] = header
                else:
                    strangers.append(header)
    return Checkpoint(folder, index, headers, broken, read_config(folder), tuple(strangers))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the cycle collector, which would search 92,000 new tensors for cycles again and again and find none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def member_files(files: set[str], index: Index | None) -> set[str]:
    """The files that make up the checkpoint: those the index names and those named like shards of a save.

    Without an index, as loaders do, `model.safetensors` alone when it is there, else every file.
    """
    if index is not None and index.weight_map:
        listed = set(index.files())
        return {file for file in files if file in listed or SHARD_NAME.fullmatch(file)}
    return {SINGLE} if SINGLE in files else files
