"""What each worker of a run on the CPU should hold, to the byte, and by how much its phases make it grow.

`fsdp2` and `megatron` know the workers of verl's two backends; here a recipe is told to the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atlasrl.memory import fsdp2, megatron
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.parameters import share
from atlasrl.memory.worker import Batch, Expected

if TYPE_CHECKING:
    from atlasrl.recipe import Recipe

SCORED = 4  # micro-batches that a CPU worker scores at once: without a graph so many more rows fit


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
    backend = fsdp2 if recipe.backend == "fsdp2" else megatron
    return backend.expected(recipe, a, batch_of(recipe, world, tokens, routed), world, rank)
