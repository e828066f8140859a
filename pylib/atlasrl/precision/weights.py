"""Digests of training and rollout weights around each weight sync, and what they tell.

A worker of a watched run leaves one line per sync in attempts/<n>/weights/worker-<rank>.jsonl: the weights that
training sent, and the rollout's before and after. Before the first sync they are what the engine loaded or, with a
dummy load format, made up. A rollout tensor that a sync left as it was, while training had moved on, is a frozen one.

Engines fuse and rename (qkv_proj, w13): tensors of both sides are compared where their names agree, and before with
after where they do not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from atlasrl.errors import Fault
from atlasrl.rundir import read_json_lines

CHUNK = 1 << 24
MOSTLY = 0.5
"""Share of the rollout's tensors that a sync changes, above which an unchanged one is suspicious."""

Table = dict[str, list]
"""Tensor name -> [digest, norm]."""


@dataclass(frozen=True)
class Suspicion:
    """A tensor that a sync did not bring over."""

    sync: int
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"sync {self.sync}: {self.tensor} {self.what}"


@torch.no_grad()
def digest(tensor: torch.Tensor) -> str:
    """Sixteen hex digits of a tensor's bits, computed where it lies: sum of bits · odd position number, modulo 2^64.

    Any single changed bit changes it, and so does any swap of two different elements.
    """
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = 0
    for start in range(0, len(bits), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + len(part), device=part.device)
        total += int((part * (2 * places + 1)).sum())
    return f"{total % 2**64:016x}"


def table(tensors: Iterable[tuple[str, torch.Tensor]]) -> Table:
    """Digest and norm of each tensor."""
    return {name: entry(tensor) for name, tensor in tensors}


def entry(tensor: torch.Tensor) -> list:
    norm = float(torch.linalg.vector_norm(tensor.detach().float())) if tensor.is_floating_point() else 0.0
    return [digest(tensor), float(f"{norm:.6g}")]


def append(file: Path, line: dict) -> None:
    """Add one sync of one worker."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def read(folder: Path) -> dict[str, list[dict]]:
    """The syncs of each worker.

    Raises:
        Fault: the attempt was not watched.
    """
    files = sorted(folder.glob("worker-*.jsonl"))
    if not files:
        raise Fault(f"{folder} holds no digests; watch the first syncs of a run with probe.syncs in its recipe")
    return {file.stem: list(read_json_lines(file)) for file in files}


def suspicions(syncs: list[dict]) -> Iterator[Suspicion]:
    """What is wrong with the syncs of one worker: {"sync", "sent", "before", "after", "stale"} each."""
    for line in syncs:
        sync, sent, before, after = line["sync"], line["sent"], line["before"], line["after"]
        moved = [name for name in after if name in before and after[name][0] != before[name][0]]
        for name in after:
            if name in sent:
                if after[name][0] != sent[name][0]:
                    yield Suspicion(sync, name, "differs between training and rollout after the sync")
            elif name in before and name not in moved and len(moved) > MOSTLY * len(after):
                yield Suspicion(sync, name, f"of the rollout was left as it was, {len(moved)} others changed")
        for sentence in line.get("stale", ()):
            yield Suspicion(sync, sentence, "and was not updated with it")


def unmoved(syncs: list[dict]) -> list[str]:
    """Tensors that training sent unchanged in every sync.

    Often right: expert biases are no parameters, and in BF16 a small learning rate does not move a norm near 1.
    """
    if len(syncs) < 2:
        return []
    first = syncs[0]["sent"]
    return [name for name in first if all(line["sent"].get(name, [None])[0] == first[name][0] for line in syncs)]


def disagreements(workers: dict[str, list[dict]]) -> Iterator[Suspicion]:
    """Tensors that training sent with other content on one worker than on the first: replicas have diverged."""
    (first, lines), *others = workers.items()
    sent = {line["sync"]: line["sent"] for line in lines}
    for worker, theirs in others:
        for line in theirs:
            for name, (found, _) in line["sent"].items():
                if name in sent.get(line["sync"], {}) and sent[line["sync"]][name][0] != found:
                    yield Suspicion(line["sync"], name, f"of {worker} differs from that of {first}")


def lines_of(syncs: list[dict], names: Iterable[str]) -> Iterator[str]:
    """A table of tensors over the syncs of one worker: digest (norm) at init, then sent and after each sync."""
    for name in names:
        yield name
        for line in syncs:
            if line is syncs[0] and name in line["before"]:
                yield _row("init", "rollout", line["before"][name])
            for moment, side, key in (("sync", "training", "sent"), ("after", "rollout", "after")):
                if name in line[key]:
                    yield _row(f"{moment} {line['sync']}", side, line[key][name])


def _row(moment: str, side: str, found: list) -> str:
    return f"    {moment:8} {side:8} {found[0]}  norm {found[1]:.6g}"
