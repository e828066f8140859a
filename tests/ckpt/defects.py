"""Seeded defects: each damages a sound miniature checkpoint in one way that was met in the field.

`SEEDED` maps the kind of finding that `ckpt verify` must report to the ways of causing it. Letters and numbers are
those of the field reports in docs/ckpt.md.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tiny_checkpoints import read_weight_map, write_index, write_shard

from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.header import Tensor, header_bytes, read_header

INDEX = "model.safetensors.index.json"
FIRST, SECOND, THIRD = (f"model-{n:05d}-of-000003.safetensors" for n in (1, 2, 3))
UP = "model.layers.0.mlp.up_proj.weight"
INV_FREQ = "model.layers.1.self_attn.rotary_emb.inv_freq"
NUMPY = {"BF16": "<u2", "F32": "<f4", "F8_E4M3": "u1"}


def read_shard(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    header = read_header(path)
    data = path.read_bytes()[header.data_start :]
    return {
        t.name: (t.dtype, np.frombuffer(data[t.begin : t.end], NUMPY[t.dtype]).reshape(t.shape))
        for t in header.tensors.values()
    }


def reindex(folder: Path, **more: str) -> None:
    """Write an index that agrees with the shards."""
    checkpoint = read_checkpoint(folder)
    weight_map = {name: file for file, header in checkpoint.headers.items() for name in header.tensors}
    write_index(folder, weight_map | more, checkpoint.nbytes)


def list_also(folder: Path, name: str, file: str = FIRST) -> None:
    write_index(folder, read_weight_map(folder) | {name: file}, read_checkpoint(folder).nbytes)


def edit_shard(folder: Path, file: str, edit: Callable[[dict], None], index: bool = True) -> None:
    """Change the tensors of a shard, consistently with the index unless told otherwise."""
    tensors = read_shard(folder / file)
    edit(tensors)
    write_shard(folder / file, tensors)
    if index:
        reindex(folder)


def edit_all(folder: Path, edit: Callable[[dict], None]) -> None:
    for file in (FIRST, SECOND, THIRD):
        edit_shard(folder, file, edit, index=False)
    reindex(folder)


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def edit_bytes(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def edit_header(path: Path, edit: Callable[[dict], object]) -> None:
    """Change the JSON of a header, data untouched."""
    header, data = read_header(path), path.read_bytes()
    content = json.loads(data[8 : header.data_start])
    text = json.dumps(edit(content) or content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[header.data_start :])


def move_tensor(folder: Path, gap: int) -> None:
    """Shift the second tensor of a shard's header by some bytes: onto its neighbour, or away from it."""
    header = read_header(folder / FIRST)
    tensors = sorted(header.tensors.values(), key=lambda t: t.begin)
    moved = [tensors[0], *(Tensor(t.name, t.dtype, t.shape, t.begin + gap, t.end + gap) for t in tensors[1:])]
    data = (folder / FIRST).read_bytes()[header.data_start :]
    (folder / FIRST).write_bytes(header_bytes(moved, {"format": "pt"}) + data + bytes(max(0, gap)))


def remove_where(part: str) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return edit


def rename_where(part: str, other: str) -> Callable[[dict], None]:
    def edit(tensors: dict) -> None:
        for name in [name for name in tensors if part in name]:
            tensors[name.replace(part, other)] = tensors.pop(name)

    return edit


def put(name: str, dtype: str, array: np.ndarray) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: (dtype, array)})


def repeat_index_line(folder: Path) -> None:
    """D14: JSON readers keep the last of two equal keys silently."""
    edit_bytes(folder / INDEX, lambda t: t.replace(b'"weight_map": {', b'"weight_map": {"model.norm.weight": "x",'))


def repeat_header_key(folder: Path) -> None:
    header, data = read_header(folder / FIRST), (folder / FIRST).read_bytes()
    text = data[8 : header.data_start].rstrip().replace(b"{", b'{"__metadata__":{"format":"pt"},', 1)
    (folder / FIRST).write_bytes(len(text).to_bytes(8, "little") + text + data[header.data_start :])


def set_metadata(folder: Path, metadata: dict) -> None:
    content = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**content, "metadata": metadata}))


def round_bias(tensors: dict) -> None:
    for name in [name for name in tensors if name.endswith("correction_bias")]:
        tensors[name] = ("BF16", (tensors[name][1].view(np.uint32) >> 16).astype("<u2"))


def reshape_scales(tensors: dict) -> None:
    """E6: 8 scales for 1000 rows would make blocks of 125."""
    for name in [name for name in tensors if name.endswith("_scale_inv")][:1]:
        tensors[name] = ("F32", np.ones((9, 1), "<f4"))


def spoil(folder: Path, bits: int) -> None:
    """Overwrite the last two values of a BF16 checkpoint."""
    edit_bytes(folder / THIRD, lambda data: data[:-4] + bits.to_bytes(2, "little") * 2)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4302383966\n"
ONE = np.ones((2, 2), "<f4")

# kind -> ways to cause it in a BF16 checkpoint
SEEDED: dict[str, list[Callable[[Path], object]]] = {
    # index and shards
    "stale_key": [lambda f: list_also(f, INV_FREQ)],  # D1
    "absent_tensor": [lambda f: list_also(f, "mtp.fc.weight")],  # D5
    "unlisted_tensor": [lambda f: edit_shard(f, SECOND, put("extra", "F32", ONE), index=False)],  # D5
    "wrong_file": [lambda f: list_also(f, "model.norm.weight", THIRD)],
    "duplicate_key": [repeat_index_line, repeat_header_key],  # D14
    "total_size": [lambda f: set_metadata(f, {"total_size": 1})],  # D6
    "no_total_size": [lambda f: set_metadata(f, {})],  # D6, D7
    "missing_file": [lambda f: (f / SECOND).unlink()],  # C16
    "missing_shard": [lambda f: (f / SECOND).unlink()],
    "mixed_numbering": [lambda f: shutil.copy(f / FIRST, f / "model-00001-of-00002.safetensors")],
    "tensor_twice": [lambda f: shutil.copy(f / FIRST, f / "model-00001-of-00002.safetensors")],
    "no_index": [lambda f: (f / INDEX).unlink()],
    "empty_index": [lambda f: write_index(f, {}, 0)],
    "unsafe_name": [lambda f: list_also(f, "a", "../../etc/passwd"), lambda f: list_also(f, "a", "/etc/passwd")],
    "unreadable_json": [
        lambda f: (f / INDEX).write_text('{"weight_map": {'),
        lambda f: (f / INDEX).write_text("[]"),
        lambda f: (f / "config.json").write_text("{,}"),
        lambda f: edit_bytes(f / "config.json", lambda t: t.replace(b"{", b'{"vocab_size": 1,', 1)),
    ],
    "unlisted_file": [lambda f: write_shard(f / "adapter.safetensors", {"a": ("F32", ONE)})],
    "empty_shard": [lambda f: (write_shard(f / "model-00002-of-000003.safetensors", {}), reindex(f))],
    # files
    "truncated": [
        lambda f: edit_bytes(f / FIRST, lambda data: data[:-8]),  # D11
        lambda f: edit_bytes(f / FIRST, lambda data: data[:100]),
        lambda f: edit_bytes(f / FIRST, lambda data: data[:5]),
    ],
    "trailing_bytes": [lambda f: edit_bytes(f / FIRST, lambda data: data + bytes(8))],  # D11
    "empty_file": [lambda f: (f / FIRST).write_bytes(b"")],  # D11
    "lfs_pointer": [lambda f: (f / FIRST).write_bytes(LFS)],  # D11
    "not_safetensors": [
        lambda f: (f / FIRST).write_bytes(b"<!DOCTYPE html><html>please log in</html>"),
        lambda f: (f / FIRST).write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64)),
    ],
    "overlap": [lambda f: move_tensor(f, -2)],
    "hole": [lambda f: move_tensor(f, 8)],
    "bad_header": [
        lambda f: edit_header(f / FIRST, lambda h: h.update(a={"dtype": "F9", "shape": [], "data_offsets": [0, 0]})),
        lambda f: edit_header(f / FIRST, lambda h: h.update(a={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]})),
        lambda f: edit_header(f / FIRST, lambda h: h.update(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]})),
        lambda f: edit_header(f / FIRST, lambda h: h.update(a=[1])),
        lambda f: edit_header(f / FIRST, lambda h: [h]),
        lambda f: edit_bytes(f / FIRST, lambda data: data[:8] + b"\xff" + data[9:]),
    ],
    "no_format": [  # D8
        lambda f: edit_header(f / FIRST, lambda h: h.pop("__metadata__") and None),
        lambda f: edit_header(f / FIRST, lambda h: h.update(__metadata__={})),
    ],
    # config and model
    "no_config": [lambda f: (f / "config.json").unlink()],
    "missing_layer": [lambda f: edit_config(f, num_hidden_layers=9, num_nextn_predict_layers=0)],
    "extra_layer": [lambda f: edit_config(f, num_nextn_predict_layers=0)],  # D3
    "mtp_absent": [lambda f: edit_all(f, remove_where(".layers.3."))],  # D3
    "experts": [lambda f: edit_all(f, remove_where("layers.2.mlp.experts.1."))],
    "unexpected_tensor": [  # C16
        lambda f: edit_all(f, rename_where("experts.0.gate_proj.weight", "experts.gate_proj.weight0")),
    ],
    "missing_tensor": [
        lambda f: edit_all(f, remove_where("lm_head")),  # D12
        lambda f: edit_all(f, remove_where("layers.1.self_attn.kv_a_layernorm")),
    ],
    "wrong_shape": [lambda f: edit_config(f, vocab_size=128)],
    "buffer_in_shard": [lambda f: edit_shard(f, FIRST, put(INV_FREQ, "F32", ONE))],
    "dtype": [lambda f: edit_config(f, torch_dtype="float32")],
    "rounded_bias": [lambda f: edit_all(f, round_bias)],  # E7
    # FP8
    "leftover_scale": [  # E9
        lambda f: edit_shard(f, FIRST, put(f"{UP}_scale_inv", "F32", ONE)),
    ],
    "stale_quantization": [  # E4
        lambda f: edit_config(f, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        lambda f: edit_config(f, text_config={"quantization_config": {"quant_method": "fp8"}}),
    ],
}

# the same for an FP8 checkpoint
SEEDED_FP8: dict[str, list[Callable[[Path], object]]] = {
    "missing_scale": [lambda f: edit_all(f, remove_where("layers.0.mlp.up_proj.weight_scale_inv"))],  # E2
    "orphan_scale": [
        lambda f: edit_all(f, remove_where("layers.0.mlp.up_proj.weight")) or edit_shard(
            f, FIRST, put(f"{UP}_scale_inv", "F32", ONE)
        ),
        lambda f: edit_shard(f, FIRST, put("model.embed_tokens.weight_scale_inv", "F32", ONE)),
    ],
    "scale_shape": [lambda f: edit_shard(f, FIRST, reshape_scales)],  # E5, E6
    "scale_dtype": [
        lambda f: edit_shard(f, FIRST, put(f"{UP}_scale_inv", "F8_E4M3", np.ones((2, 2), "u1"))),
    ],
    "other_byte_dtype": [
        lambda f: edit_header(f / FIRST, lambda h: h[UP].update(dtype="I8")),  # E2
    ],
    "quantization": [
        lambda f: edit_config(f, quantization_config=None),
        lambda f: edit_config(f, quantization_config={"quant_method": "fp8", "fmt": "e4m3"}),
        lambda f: edit_config(f, quantization_config={"weight_block_size": [128, 128], "fmt": "e5m2"}),
    ],
}  # fmt: skip

# found only by reading the data, in a BF16 checkpoint whose checksums are stored
SEEDED_DEEP: dict[str, list[Callable[[Path], object]]] = {
    "not_finite": [lambda f: spoil(f, 0x7FC0), lambda f: spoil(f, 0x7F80)],
    "checksum": [lambda f: spoil(f, 0x3F80)],
}
