"""What each worker of a run on the CPU should hold, to the byte, and by how much its phases make it grow.

`fsdp2` and `megatron` know the workers of verl's two backends; what both are told and what they answer is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlasrl.memory.architecture import Architecture
from atlasrl.memory.parameters import share

if TYPE_CHECKING:
    from atlasrl.recipe import Recipe

FLOAT = 4  # bytes
SCORED = 4  # micro-batches that a CPU worker scores at once: without a graph so many more rows fit


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


def batch_of(recipe: Recipe, world: int, tokens: int | None = None, routed: int | None = None) -> Batch:
    """The batch shapes of one worker of a recipe; `tokens` of the longest row and `routed` where they are known."""
    answers = share(recipe.dapo.train_batch_size * recipe.rollout.samples, world)
    scored = recipe.dapo.micro_batch_size * (SCORED if recipe.rollout.engine == "cpu" else 1)
    return Batch(
        tokens=tokens or recipe.data.max_prompt_tokens + recipe.data.max_response_tokens,
        response=recipe.data.max_response_tokens,
        rows=min(recipe.dapo.micro_batch_size, answers),
        scored_rows=min(scored, answers),
        recompute=recipe.parallel.recompute == "full",
        routed=routed,
    )


def expected(
    recipe: Recipe, a: Architecture, world: int, rank: int, tokens: int | None = None, routed: int | None = None
) -> Expected:
    """Predict worker `rank` of `world`; see `Batch` for `tokens` and `routed`.

    Raises:
        UsageFault: a Megatron split or model that is not predicted.
    """
    from atlasrl.memory import fsdp2, megatron

    backend = fsdp2 if recipe.backend == "fsdp2" else megatron
    return backend.expected(recipe, a, batch_of(recipe, world, tokens, routed), world, rank)
