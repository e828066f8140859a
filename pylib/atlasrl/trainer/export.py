"""Export the last checkpoint as a Hugging Face folder: `python -m atlasrl.trainer.export RUN`.

Names, shards and dtypes are those of the BF16 checkpoint that training started from: the router bias stays FP32, which
verl's own merger would round to BF16 (verl 0.7.0, model_merger/fsdp_model_merger.py, `.bfloat16()` on all tensors).
The result is proven: its index verifies, its tensors are those that were trained, and transformers loads it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from atlasrl import checkpoints
from atlasrl.checkpoints import Checkpoint
from atlasrl.errors import Fault
from atlasrl.rundir import RunDir, write_atomically

if TYPE_CHECKING:
    import torch

RECORD = "export.json"
SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")


def export(run: RunDir, base: Path) -> str:
    """Write RUN/export from the newest complete checkpoint.

    Args:
        base: the checkpoint that training started from; gives names, shards, dtypes and side files.

    Returns:
        What was done, in words.

    Raises:
        Fault: nothing complete to export, tensors are missing, or the result does not load.
    """
    checkpoint = checkpoints.choose(run)
    if exported_step(run) == checkpoint.step:
        return f"skipped: {run.export} holds step {checkpoint.step}"
    beside = run.export.with_suffix(".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    write_shards(base, beside, read_weights(checkpoint))
    copy_side_files(base, beside)
    prove(beside)
    compare_with_training(beside, read_weights(checkpoint))
    write_atomically(beside / RECORD, json.dumps({"step": checkpoint.step, "checkpoint": str(checkpoint.path)}) + "\n")
    if run.export.exists():
        shutil.rmtree(run.export)
    beside.rename(run.export)
    run.record("exported", step=checkpoint.step, path=str(run.export))
    return f"step {checkpoint.step} is in {run.export}; it verifies, loads, and holds the trained weights"


def exported_step(run: RunDir) -> int | None:
    """The step that RUN/export was made from."""
    try:
        return json.loads((run.export / RECORD).read_text())["step"]
    except (OSError, ValueError, KeyError):
        return None


def read_weights(checkpoint: Checkpoint) -> Callable[[str], torch.Tensor]:
    """A function from Hugging Face tensor name to full tensor, in the dtype of training."""
    actor = checkpoint.path / "actor"
    ranks = sorted(actor.glob("model_world_size_*_rank_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    return _from_fsdp(ranks) if ranks else _from_hugging_face(actor / "huggingface")


def _from_fsdp(ranks: list[Path]) -> Callable[[str], torch.Tensor]:
    """FSDP2 saves one pickled dict of DTensors per rank; each holds a slice along one dimension."""
    import torch
    from torch.distributed.tensor import DTensor, Shard

    states = [torch.load(path, map_location="cpu", weights_only=False) for path in ranks]  # this run wrote them

    def full(name: str) -> torch.Tensor:
        parts = [state[name] for state in states]
        if not isinstance(parts[0], DTensor):
            return parts[0]
        placement = parts[0].placements[-1]
        local = [part.to_local() for part in parts]
        return torch.cat(local, dim=placement.dim) if isinstance(placement, Shard) else local[0]

    return full


def _from_hugging_face(folder: Path) -> Callable[[str], torch.Tensor]:
    """Megatron checkpoints hold Hugging Face shards that mbridge wrote."""
    from safetensors import safe_open

    holders = {}
    for file in sorted(folder.glob("*.safetensors")):
        shard = safe_open(file, framework="pt")
        holders |= dict.fromkeys(shard.keys(), shard)
    return lambda name: holders[name].get_tensor(name)


def write_shards(base: Path, target: Path, weight: Callable[[str], torch.Tensor]) -> None:
    """Write each shard of `base` anew with trained weights, one shard in memory at a time.

    Raises:
        Fault: a tensor of the base checkpoint was not trained, or has another shape.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    for file in sorted(base.glob("*.safetensors")):
        tensors = {}
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                before = shard.get_tensor(name)
                try:
                    after = weight(name)
                except KeyError:
                    raise Fault(f"{name} of {file} is not in the training checkpoint; nothing was exported") from None
                if after.shape != before.shape:
                    raise Fault(f"{name}: trained shape {tuple(after.shape)}, but {file} has {tuple(before.shape)}")
                tensors[name] = after.to(before.dtype).contiguous()
        save_file(tensors, target / file.name, metadata={"format": "pt"})


def copy_side_files(base: Path, target: Path) -> None:
    """Config, tokenizer, index and the like; what is not text stays behind."""
    for pattern in SIDE_FILES:
        for file in base.glob(pattern):
            shutil.copyfile(file, target / file.name)


def prove(folder: Path) -> None:
    """Check index against shards, then load with transformers and run one token.

    Raises:
        Fault: the checkpoint is not what a user could load.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ckpt_tools.verify import verify

    report = verify(folder)
    if report.exit_code:
        raise Fault(f"{folder}: {report.errors[0]}")
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = {kind: sorted(info[kind])[:3] for kind in kinds if info[kind]}
    if wrong:
        raise Fault(f"{folder} does not load whole: {wrong}")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[0, 1]])).logits
    if not torch.isfinite(logits).all():
        raise Fault(f"{folder} loads, but its logits are not finite")


def compare_with_training(folder: Path, weight: Callable[[str], torch.Tensor]) -> None:
    """Read every exported tensor back and hold it against the training checkpoint, which is read anew.

    Raises:
        Fault: a tensor is not the trained one, rounded to the dtype of the export.
    """
    import torch
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                found = shard.get_tensor(name)
                if not torch.equal(found, weight(name).to(found.dtype)):
                    raise Fault(f"{file}: {name} is not what the training checkpoint holds; export again")


def main(run: str, base: str) -> int:
    try:
        print(export(RunDir(run), Path(base)))
    except Fault as fault:
        print(f"error: {fault}")
        return fault.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
