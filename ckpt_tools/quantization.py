"""Block-quantised FP8 as DeepSeek-V3 ships it: weights in e4m3, one scale per block in `<name>_scale_inv`.

The block comes from `quantization_config.weight_block_size`, never from dividing shapes: 1000 rows with 8 scales are
blocks of 128, not of 125 (TensorRT-Model-Connect#1115).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.errors import Fault
from ckpt_tools.families import SCALE_SUFFIX
from ckpt_tools.header import Tensor

SCALE_DTYPES = ("F32", "BF16", "F16")
OTHER_BYTE_DTYPES = ("F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2", "I8", "U8")


def quantization_of(config: dict) -> dict | None:
    """The `quantization_config` of a model, also when it lies in a nested config such as `text_config`."""
    found = config.get("quantization_config")
    if isinstance(found, dict):
        return found
    nested = (quantization_of(value) for value in config.values() if isinstance(value, dict))
    return next((found for found in nested if found), None)


def without_quantization(config: dict) -> dict:
    """The config of the BF16 model: no `quantization_config` at any depth, the dtype set where one was set."""
    result = {}
    for key, value in config.items():
        if key == "quantization_config":
            continue
        if isinstance(value, dict):
            result[key] = without_quantization(value)
        elif key in ("torch_dtype", "dtype"):
            result[key] = "bfloat16"
        else:
            result[key] = value
    return result


def block_of(config: dict) -> tuple[int, int]:
    """Rows and columns of a block.

    Raises:
        Fault: the config does not say, or says something that is not a block of e4m3 weights.
    """
    quantization = quantization_of(config)
    if quantization is None:
        raise Fault(
            "config.json: the shards hold FP8 weights and there is no quantization_config; "
            "restore config.json from the model's origin, the block size cannot be guessed"
        )
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n <= 1 << 20 for n in block)):
        raise Fault(
            f"config.json: quantization_config.weight_block_size is {block!r}, expected two sizes such as [128, 128]; "
            "only block-quantised FP8 can be cast"
        )
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise Fault(f"config.json: quantization_config.fmt is {quantization['fmt']!r}; only e4m3 can be cast")
    return block[0], block[1]


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a 2-D weight: one per begun block."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def quantization_problems(tensors: dict[str, Tensor], block: tuple[int, int]) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, tensor, problem) for everything that keeps FP8 weights and scales from pairing exactly."""
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX):
            weight = tensors.get(name.removesuffix(SCALE_SUFFIX))
            if weight is None:
                yield "orphan_scale", name, "a scale without its weight"
            elif weight.dtype != "F8_E4M3":
                yield "orphan_scale", name, f"a scale of a {weight.dtype} weight, which needs none"
            continue
        if tensor.dtype in OTHER_BYTE_DTYPES:
            yield "other_byte_dtype", name, f"dtype {tensor.dtype}: not e4m3, and nothing says how to cast it"
        if tensor.dtype != "F8_E4M3":
            continue
        scale = tensors.get(name + SCALE_SUFFIX)
        if scale is None:
            yield "missing_scale", name, f"an FP8 weight without {name}{SCALE_SUFFIX}"
        elif len(tensor.shape) != 2:
            yield "scale_shape", name, f"an FP8 tensor of shape {list(tensor.shape)}; only matrices have blocks"
        elif scale.shape != (wanted := scale_shape(tensor.shape, block)):
            found = f"scales of shape {list(scale.shape)}, {list(wanted)} expected"
            yield "scale_shape", name, f"shape {list(tensor.shape)} in blocks of {list(block)}: {found}"
        elif scale.dtype not in SCALE_DTYPES:
            yield "scale_dtype", name, f"scales in {scale.dtype}, expected one of {', '.join(SCALE_DTYPES)}"
