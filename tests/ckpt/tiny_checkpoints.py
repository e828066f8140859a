"""Miniature checkpoints: real files of real families, small enough to build in milliseconds."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np

from ckpt_tools.families import expected_shapes
from ckpt_tools.header import Tensor, header_bytes

TINY_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 192,
    "intermediate_size": 160,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
PLAIN = ("embed", "norm", "gate.weight", "head", "eh_proj", "bias")
"""Parts of names that DeepSeek-V3 keeps out of FP8."""


def write_shard(path: Path, tensors: dict[str, tuple[str, np.ndarray]], metadata: dict | None = None) -> None:
    """Write one safetensors file from name -> (dtype, array whose bytes are the data)."""
    entries, position = [], 0
    for name, (dtype, array) in tensors.items():
        entries.append(Tensor(name, dtype, tuple(array.shape), position, position + array.nbytes))
        position += array.nbytes
    data = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(header_bytes(entries, {"format": "pt"} if metadata is None else metadata) + data)


def write_checkpoint(folder: Path, shards: list[dict], config: dict, total: int | None = None) -> Path:
    """Write shards, index and config; every shard is a dict of name -> (dtype, array)."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map, size = {}, 0
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_shard(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(array.nbytes for _, array in tensors.values())
    write_index(folder, weight_map, size if total is None else total)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def read_weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def random_codes(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random e4m3 bytes: every code but the two NaNs."""
    codes = generator.integers(0, 254, shape, dtype=np.uint8)
    return np.where((codes & 127) == 127, np.uint8(5), codes)


def random_tensor(generator, name: str, shape: tuple[int, ...], fp8: bool) -> dict:
    """One tensor of a DeepSeek checkpoint, with its scales when it is quantised."""
    if fp8 and len(shape) == 2 and not any(part in name for part in PLAIN):
        scales = generator.uniform(1e-4, 1e-2, (-(-shape[0] // 128), -(-shape[1] // 128))).astype("<f4")
        return {name: ("F8_E4M3", random_codes(generator, shape)), f"{name}_scale_inv": ("F32", scales)}
    if name.endswith("e_score_correction_bias"):
        return {name: ("F32", generator.uniform(9, 11, shape).astype("<f4"))}
    wide = generator.normal(0, 0.02, shape).astype("<f4")
    return {name: ("BF16", (wide.view(np.uint32) >> 16).astype("<u2"))}


def deepseek(folder: Path, *, fp8: bool = True, shards: int = 3, seed: int = 0, **changes) -> Path:
    """A tiny DeepSeek-V3 with an MTP layer: FP8 with scales, or BF16."""
    folder.mkdir(parents=True)
    for name, content in _deepseek_files(fp8, shards, seed, json.dumps(changes)).items():
        (folder / name).write_bytes(content)
    return folder


@functools.cache
def _deepseek_files(fp8: bool, shards: int, seed: int, changes: str) -> dict[str, bytes]:
    config = {**TINY_DEEPSEEK, **json.loads(changes)}
    generator = np.random.default_rng(seed)
    members: list[dict] = [{} for _ in range(shards)]
    shapes = expected_shapes(config)
    for position, (name, shape) in enumerate(shapes.items()):
        members[position * shards // len(shapes)] |= random_tensor(generator, name, shape, fp8)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), members, {**config, "quantization_config": QUANTISED} if fp8 else config)
        return tree_bytes(Path(folder))


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """All files of a checkpoint folder with their bytes, our notes left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".ckpt" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
