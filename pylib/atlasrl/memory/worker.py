"""One worker of a run on the CPU: the shapes it is given, the bytes it should hold, and the growth of its phases."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Batch:
    """Shapes of one worker's forward passes; every row is padded to `tokens`."""

    tokens: int  # of the longest row
    response: int
    rows: int  # of one micro-batch of the update
    scored_rows: int  # of one forward pass that scores
    recompute: bool = False
    routed: int | None = None  # tokens that one layer's experts on this worker got; None: an equal share


@dataclass(frozen=True)
class Tensors:
    """Exact bytes of the tensors that one worker holds."""

    weights: int
    buffers: int
    gradients: int  # FSDP2: from the first backward to the end of the update
    optimizer: int  # from the first step on
    update_logits: int  # the last layer's output of one micro-batch
    score_logits: int


@dataclass(frozen=True)
class Growth:
    """Resident growth of one phase over its beginning: by term, bytes."""

    terms: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())


@dataclass(frozen=True)
class Expected:
    """One worker: what it holds, and by how much each phase makes it grow."""

    tensors: Tensors
    growths: dict[str, Growth]
