"""Write weights as DeepSeek-V3 stores them: FP8 blocks with inverse scales, shards, an index with stale keys."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

BLOCK = 128
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448

# What DeepSeek-V3 keeps out of FP8: embeddings, heads, norms, the router and the MTP projection.
PLAIN = re.compile(r"(embed_tokens|lm_head|head|norm|layernorm|enorm|hnorm|gate|eh_proj)\.weight$")


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a [rows, columns] float32 weight into blocks of 128×128, the last ones smaller.

    Returns:
        The weight in float8_e4m3fn, and `weight_scale_inv` [ceil(rows/128), ceil(columns/128)] in float32:
        value = FP8 value × scale of its block.
    """
    rows, columns = weight.shape
    scale_inv = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    quantized = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scale_inv[i, j] = weight[block].abs().max() / FP8_MAX
            quantized[block] = (weight[block] / scale_inv[i, j]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return quantized, scale_inv


def store(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint in file order: FP8 with scales, BF16, and F32 for the router's bias."""
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name.endswith("e_score_correction_bias"):
            stored[name] = weight.float()
        elif PLAIN.search(name):
            stored[name] = weight.to(torch.bfloat16)
        else:
            stored[name], stored[f"{name}_scale_inv"] = quantize(weight)
    return stored


def write(folder: Path, weights: dict[str, torch.Tensor], layers: int, shard_bytes: int) -> None:
    """Write the shards and the index.

    A shard is closed by the tensor that fills it to `shard_bytes`, mostly a weight, whose scale then opens the next
    shard: a scale in another shard than its weight is nothing special in real checkpoints. The index also lists
    `rotary_emb.inv_freq` of every layer, which no shard holds, as the published index does.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in store(weights).items():
        if sum(held.nbytes for held in shards[-1].values()) >= shard_bytes:
            shards.append({})
        shards[-1][name] = tensor.contiguous()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    for layer in range(layers):
        beside = weight_map[f"model.layers.{layer}.self_attn.o_proj.weight"]
        weight_map[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = beside
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
