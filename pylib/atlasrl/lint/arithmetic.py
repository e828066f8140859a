"""DAPO in numbers: what a step generates, learns and takes, before it runs. Pure but for the rows of a parquet file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atlasrl.errors import Fault

if TYPE_CHECKING:
    from pathlib import Path

    from atlasrl.recipe import Recipe


@dataclass(frozen=True)
class Arithmetic:
    """Of one training step unless said otherwise. None: not known before the run."""

    prompts: int
    samples: int
    """Answers that are learned from."""
    generated_least: int
    """Answers generated, when no group is dropped."""
    generated_most: int
    updates: int
    samples_per_update: int
    longest_tokens: int
    """Of all answers that are learned from with their prompts, at full length."""
    steps: int
    dataset: int | None
    """Prompts of one epoch."""
    steps_per_epoch: int | None
    """When no group is dropped."""
    step_seconds: float | None
    """Measured, or estimated by atlasrl.memory.cost for full-length answers."""
    measured: bool
    hours: float | None

    def lines(self) -> list[str]:
        """For a person."""
        per_prompt = self.samples // self.prompts
        lines = [
            f"a step: {self.prompts} prompts x {per_prompt} answers = {self.samples} samples, at most "
            f"{self.longest_tokens:,} tokens",
            f"  generated: {self.generated_least} to {self.generated_most} answers (groups without contrast drop out)"
            if self.generated_most > self.generated_least
            else f"  generated: {self.generated_least} answers",
            f"  updates: {self.updates} of {self.samples_per_update} samples",
        ]
        if self.steps_per_epoch is not None:
            epochs = self.steps / self.steps_per_epoch
            lines.append(
                f"an epoch: {self.dataset:,} prompts = {self.steps_per_epoch} steps when nothing is dropped; "
                f"{self.steps} steps are {epochs:.2f} epochs or more"
            )
        else:
            lines.append("an epoch: unknown, the data is not on this machine (--prompts N)")
        if self.hours is None:
            lines.append(f"{self.steps} steps: hours unknown (--step-minutes M, as bin/status shows for a run)")
        else:
            how = "as given" if self.measured else "estimated for full-length answers; ranks splits, is no promise"
            lines.append(
                f"{self.steps} steps: {self.hours:.1f} hours at {self.step_seconds / 60:.1f} min a step, {how}"
            )
        return lines


def of_recipe(
    recipe: Recipe, nodes: int, devices: int, prompts: int | None = None, step_minutes: float | None = None
) -> Arithmetic:
    """The numbers of a recipe on `nodes` nodes of `devices` devices.

    Args:
        prompts: rows of the training data; absent: read from the file when it is here.
        step_minutes: measured time of a step; absent: estimated where the memory model knows recipe and device.
    """
    dapo, samples = recipe.dapo, recipe.rollout.samples
    generated = dapo.gen_batch_size or dapo.train_batch_size
    least = -(-dapo.train_batch_size // generated)
    most = max(dapo.max_gen_batches, least) if dapo.dynamic_sampling else least
    longest = recipe.data.max_prompt_tokens + recipe.data.max_response_tokens
    dataset = prompts if prompts is not None else rows(recipe.data.train)
    seconds = step_minutes * 60 if step_minutes else _estimate(recipe, nodes, devices)
    return Arithmetic(
        prompts=dapo.train_batch_size,
        samples=dapo.train_batch_size * samples,
        generated_least=least * generated * samples,
        generated_most=most * generated * samples,
        updates=-(-dapo.train_batch_size // dapo.mini_batch_size),
        samples_per_update=min(dapo.mini_batch_size, dapo.train_batch_size) * samples,
        longest_tokens=dapo.train_batch_size * samples * longest,
        steps=recipe.steps,
        dataset=dataset,
        steps_per_epoch=None if dataset is None else dataset // (least * generated),
        step_seconds=seconds,
        measured=bool(step_minutes),
        hours=None if seconds is None else recipe.steps * seconds / 3600,
    )


def rows(file: Path | None) -> int | None:
    """Rows of a parquet file by its footer; None when it is not here or not readable."""
    if file is None or not file.is_file():
        return None
    try:
        import pyarrow.parquet

        return pyarrow.parquet.read_metadata(file).num_rows
    except Exception:  # preflight says what is wrong with the file; here it is only unknown
        return None


def _estimate(recipe: Recipe, nodes: int, devices: int) -> float | None:
    from atlasrl.memory import cost, job, verdict

    if recipe.backend != "megatron" or recipe.device != "npu":
        return None
    recipe = recipe.model_copy(update={"devices_per_node": devices})
    try:
        a = job.architecture_of(recipe)
        split, j = job.of_recipe(recipe, a, nodes)
    except Fault:
        return None
    if verdict.illegal(recipe, a, split, j):
        return None
    return sum(cost.step_seconds(a, split, j).values())
