"""Dump what every module of a model takes in and gives out: statistics and a sampled slice, bounded in bytes (axis 4).

    DUMP/dump.json                 facts: input digest, step, bound, whether everything fitted
    DUMP/index.jsonl               one line per tensor, in the order of execution
    DUMP/samples-0001.safetensors  sampled slices, float32, named by line number

A slice is taken at places that depend on the number of elements alone, so dumps of two machines are comparable without
either holding whole tensors. Only torch's own hooks are used: the dump works on any device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from atlasrl.errors import Fault, UsageFault
from atlasrl.precision import aliases, weights
from atlasrl.rundir import write_atomically

SAMPLE = 256
LIMIT = 256 << 20
PART = 8 << 20  # bytes of samples held in memory before they are written
HEADER = 128  # bytes that a tensor costs in the header of a safetensors file, at most
RESERVE = 4096  # for dump.json
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class Rows(NamedTuple):
    """Recorded answers as a model takes them, each [rows, tokens]: tokens, no padding, part of an answer."""

    ids: torch.Tensor
    mask: torch.Tensor
    answer: torch.Tensor


class Recorder:
    """Writes one dump.

    Args:
        folder: new or empty.
        limit: the most bytes that the dump may take on disk; what does not fit is left out, and dump.json says so.
        sample: elements per slice.

    Raises:
        UsageFault: the folder holds something, or the bound is too small for anything.
    """

    def __init__(self, folder: Path, *, limit: int = LIMIT, sample: int = SAMPLE, **facts):
        if limit < 2 * RESERVE:
            raise UsageFault(f"a dump of {limit} bytes holds nothing; allow at least {2 * RESERVE}")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageFault(f"{folder} is not empty; a dump needs a folder of its own")
        self.folder, self.limit, self.sample, self.facts = folder, limit, sample, facts
        self.used, self.lines, self.left_out = RESERVE, 0, 0
        self.open_calls: list[int] = []
        self.calls = 0
        self.pending: dict[str, torch.Tensor] = {}
        self.waiting = 0  # bytes of `pending`
        self.parts = 0
        self.index = (folder / "index.jsonl").open("w")

    @contextlib.contextmanager
    def watch(self, model: nn.Module, name: str = "") -> Iterator[None]:
        """Record every module call of one forward pass. A module that recomputes runs again later: put only the
        forward pass inside."""
        hooks = []
        for path, module in model.named_modules():
            shown = clean(f"{name}.{path}".strip(".")) or "(model)"
            hooks.append(module.register_forward_pre_hook(self._enter(shown), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.open_calls.clear()

    def gradients(self, model: nn.Module) -> None:
        """Record the gradient of every parameter, the last module's first, as backward made them."""
        for path, parameter in reversed(list(model.named_parameters())):
            if parameter.grad is not None:
                self._keep({"kind": "grad", "module": clean(path)}, parameter.grad)

    def weights(self, model: nn.Module) -> None:
        """Record parameters and persistent buffers, so that wrong weights are told from wrong arithmetic."""
        for path, tensor in aliases.weights(model).items():
            if tensor.is_floating_point():
                self._keep({"kind": "weight", "module": clean(path)}, tensor)

    def note(self, **facts) -> None:
        """Add facts to dump.json, such as loss and grad_norm."""
        self.facts |= facts

    def close(self) -> Path:
        """Write what is pending and dump.json; returns the folder."""
        self._flush()
        self.index.close()
        facts = self.facts | {
            "kind": "atlasrl.stack",
            "complete": self.left_out == 0,
            "tensors": self.lines,
            "left_out": self.left_out,
            "limit": self.limit,
            "sample": self.sample,
            "torch": torch.__version__,
            "time": round(time.time(), 3),
        }
        write_atomically(self.folder / "dump.json", json.dumps(facts, indent=1) + "\n")
        return self.folder

    def _enter(self, name: str):
        def hook(module, args, kwargs):
            call = self.calls
            self.calls += 1
            parent = self.open_calls[-1] if self.open_calls else None
            self.open_calls.append(call)
            entry = {"kind": "call", "module": name, "type": type(module).__name__, "call": call, "parent": parent}
            self._keep(entry, *tensors((args, kwargs))[:1])

        return hook

    def _leave(self, module, args, output):
        if not self.open_calls:
            return
        call = self.open_calls.pop()
        chosen = [weights.digest(tensor) for tensor in tensors(output, floating=False)]
        entry = {"kind": "out", "call": call} | ({"choice": " ".join(chosen)} if chosen else {})
        for tensor in tensors(output)[:4]:
            self._keep(entry, tensor)

    def _keep(self, entry: dict, tensor: torch.Tensor | None = None) -> None:
        """Add a line and a slice. A call on token ids alone, as of an embedding, has a line without either."""
        facts, piece = measure(tensor, self.sample) if tensor is not None else ({}, torch.empty(0))
        line = json.dumps({"line": self.lines, **entry, **facts}) + "\n"
        cost = len(line) + 4 * piece.numel() + HEADER
        if self.left_out or self.used + cost > self.limit:
            self.left_out += 1
            return
        self.used += cost
        self.index.write(line)
        self.pending[str(self.lines)] = piece
        self.waiting += 4 * piece.numel()
        self.lines += 1
        if self.waiting >= PART:
            self._flush()

    def _flush(self) -> None:
        from safetensors.torch import save

        if self.pending:
            self.parts += 1
            write_atomically(self.folder / f"samples-{self.parts:04d}.safetensors", save(self.pending))
            self.pending, self.waiting = {}, 0


def measure(tensor: torch.Tensor, sample: int) -> tuple[dict, torch.Tensor]:
    """Statistics of a tensor, and its slice as float32 on the host.

    NaN and infinite elements are counted and left out of the other statistics.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    values = local.detach().reshape(-1)
    wide = values.double() if values.device.type == "cpu" else values.float()  # an NPU has no float64
    nan = bad = 0
    names, numbers = ("min", "max", "mean", "norm"), _statistics(wide)
    if not math.isfinite(numbers[3]):
        finite = wide.isfinite()
        nan, bad = int(wide.isnan().sum()), int((~finite).sum())
        numbers = _statistics(wide[finite]) if bad < len(wide) else [0.0] * 4
    facts = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    facts |= dict(zip(names, numbers, strict=True)) | {"nan": nan, "inf": bad - nan}
    return facts, values[places(len(values), sample).to(values.device)].float().cpu()


def _statistics(values: torch.Tensor) -> list[float]:
    low, high = values.aminmax()
    return torch.stack([low, high, values.mean(), values.norm()]).tolist()  # one wait for the device


def places(elements: int, sample: int) -> torch.Tensor:
    """Where a slice is taken: at most `sample` places, evenly spread, first and last among them.

    >>> places(10, 4).tolist(), places(3, 8).tolist()
    ([0, 3, 6, 9], [0, 1, 2])
    """
    count = min(elements, sample)
    return torch.arange(count) * (elements - 1) // max(count - 1, 1)


def tensors(value, *, floating: bool = True) -> list[torch.Tensor]:
    """The tensors in a module's arguments or result, in order: those of numbers, or those of integers and truths."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() == floating and value.numel() else []
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [found for each in inner for found in tensors(each, floating=floating)]


def clean(name: str) -> str:
    """A module's name without what wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def digest(*inputs: torch.Tensor) -> str:
    """Sixteen hex digits of integer inputs: dumps are comparable only if these are equal."""
    found = hashlib.sha256()
    for tensor in inputs:
        found.update(json.dumps([list(tensor.shape), tensor.cpu().long().reshape(-1).tolist()]).encode())
    return found.hexdigest()[:16]


def record_step(model: nn.Module, rows: Rows, recorder: Recorder) -> None:
    """Record one forward and backward pass over recorded answers.

    Raises:
        Fault: no answer token.
    """
    recorder.note(inputs=digest(*rows), rows=len(rows.ids), tokens=int(rows.mask.sum()))
    recorder.weights(model)
    loss, norm = train_step(model, rows, recorder.watch(model))
    recorder.note(loss=loss, grad_norm=norm)
    recorder.gradients(model)


def train_step(model: nn.Module, rows: Rows, around_forward=None) -> tuple[float, float]:
    """Loss and gradient norm of a causal language model, its gradients left in place.

    The loss is the mean of -log p over answer tokens: a policy gradient with every advantage 1.

    Raises:
        Fault: no answer token.
    """
    if not rows.answer[:, 1:].any():
        raise Fault("the recorded rollout holds no answer token; choose another step")
    with around_forward or contextlib.nullcontext():
        logits = model(input_ids=rows.ids, attention_mask=rows.mask, use_cache=False).logits
    chosen = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, rows.ids[:, 1:, None])[..., 0]
    loss = -chosen[rows.answer[:, 1:].bool()].mean()
    loss.backward()
    squares = [p.grad.float().pow(2).sum() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack(squares).sum().sqrt().item()
