"""Dynamic sampling: every training step gets groups whose answers are neither all right nor all wrong.

verl's own `fit` stays as it is. It iterates over a `GroupSource` in place of its dataloader; each item has already been
generated, scored and filtered. When `fit` then asks its rollout manager for answers, `StoredRollouts` hands out the
stored ones with their scores, which `fit` uses instead of scoring again.

DAPO: Yu et al., arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from atlasrl.errors import Fault
from atlasrl.outcome import EXHAUSTED
from atlasrl.recipe import Recipe
from atlasrl.trainer.prompts import Prompt, PromptSource


class Exhausted(Fault):
    """`max_gen_batches` generations gave too few mixed groups."""

    exit_code = EXHAUSTED


@dataclass(frozen=True)
class Sampling:
    """How a training step is filled with groups. Sizes are in prompts."""

    train_batch_size: int
    gen_batch_size: int
    samples: int
    dynamic: bool
    max_gen_batches: int
    when_exhausted: str

    @classmethod
    def of(cls, recipe: Recipe) -> Sampling:
        dapo = recipe.dapo
        return cls(
            train_batch_size=dapo.train_batch_size,
            gen_batch_size=(dapo.gen_batch_size or dapo.train_batch_size)
            if dapo.dynamic_sampling
            else dapo.train_batch_size,
            samples=recipe.rollout.samples,
            dynamic=dapo.dynamic_sampling,
            max_gen_batches=dapo.max_gen_batches,
            when_exhausted=dapo.when_exhausted,
        )


@dataclass
class Groups:
    """Groups of one or more generations: prompt i owns rows i·samples … (i+1)·samples-1 of `answers`."""

    prompts: list[Prompt]
    answers: object
    """DataProto, group-major, with `rm_scores` and the reward's extra columns."""


@dataclass
class StepGroups:
    """What one training step is made of."""

    groups: Groups
    filled: int = 0
    """the last `filled` groups are unmixed and must not move the policy"""
    seconds: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)


def mixed(outcomes: np.ndarray) -> np.ndarray:
    """Which groups carry a gradient: not all answers have the same outcome.

    Args:
        outcomes: [groups, samples] accuracy (or score) of each answer.

    Returns:
        [groups] bool. A group of one answer always counts as mixed.
    """
    return np.ones(len(outcomes), bool) if outcomes.shape[1] == 1 else outcomes.min(1) != outcomes.max(1)


class Collector:
    """Collects one training step: generate, score, keep mixed groups, until the batch is full.

    Args:
        sampling: sizes and limits.
        prompts: where prompts come from.
        generate: `(prompts, step, generation) -> Groups`, scored.
        outcomes: `Groups -> [groups, samples]` values that decide whether a group is mixed.
        join: `(list of Groups, indices to keep of each) -> Groups`.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompts: PromptSource,
        generate: Callable[[list[Prompt], int, int], Groups],
        outcomes: Callable[[Groups], np.ndarray],
        join: Callable[[list[tuple[Groups, np.ndarray]]], Groups],
    ):
        self.sampling, self.prompts = sampling, prompts
        self.generate, self.outcomes, self.join = generate, outcomes, join

    def collect(self, step: int) -> StepGroups:
        """The groups of one step. Never more than `max_gen_batches` generations.

        Raises:
            Exhausted: too few mixed groups, and the recipe says `when_exhausted: stop`.
        """
        began, sampling = time.perf_counter(), self.sampling
        kept: list[tuple[Groups, np.ndarray]] = []
        spare: list[tuple[Groups, np.ndarray]] = []
        found = seen = generations = 0
        while found < sampling.train_batch_size and generations < (sampling.max_gen_batches if sampling.dynamic else 1):
            generations += 1
            groups = self.generate(self.prompts.take(sampling.gen_batch_size), step, generations)
            keep = mixed(self.outcomes(groups)) if sampling.dynamic else np.ones(len(groups.prompts), bool)
            missing = sampling.train_batch_size - found
            kept.append((groups, np.flatnonzero(keep)[:missing]))
            spare.append((groups, np.flatnonzero(~keep)))
            found += int(keep.sum())
            seen += len(keep)
        filled = max(0, sampling.train_batch_size - found)
        if filled:
            kept += self._fill(spare, filled, found, seen, generations, step)
        surplus = max(0, found - sampling.train_batch_size)
        counters = {
            "train/num_gen_batches": generations,
            "train/groups_generated": seen,
            "train/groups_dropped": seen - found - filled,
            "train/groups_surplus": surplus,
            "train/groups_filled": filled,
        }
        return StepGroups(self.join(kept), filled, time.perf_counter() - began, counters)

    def _fill(self, spare, filled, found, seen, generations, step) -> list[tuple[Groups, np.ndarray]]:
        arithmetic = (
            f"step {step}: {generations} generation(s) of {self.sampling.gen_batch_size} prompts gave {found} mixed "
            f"groups of {seen}, {self.sampling.train_batch_size} are needed"
        )
        if self.sampling.when_exhausted == "stop" or seen - found < filled:
            prompts = -(-self.sampling.train_batch_size * seen // found) if found else None
            needed = f"about {prompts} prompts" if prompts else "no number of prompts"
            raise Exhausted(
                f"{arithmetic} (at this rate {needed} per step would do): the data is too easy or too hard for this "
                "policy; change the data, raise dapo.gen_batch_size or dapo.max_gen_batches, or set "
                "dapo.when_exhausted=fill"
            )
        print(f"warning: {arithmetic}; filled with {filled} unmixed group(s) whose advantage is zero", flush=True)
        chosen = []
        for groups, indices in spare:
            chosen.append((groups, indices[:filled]))
            filled -= len(chosen[-1][1])
        return chosen


class GroupSource:
    """Stands where `fit` expects its training dataloader: yields one batch per step, to the end of the run.

    Args:
        steps: total steps of the run; also `len()`, so that `fit` sees one epoch.
        next_step: the number of the step that is about to start (a resume may skip many).
        collector: makes the groups.
        deliver: `StepGroups -> batch dict` for `fit`; also stores the answers for `StoredRollouts`.
    """

    sampler = None  # `fit` asks whether this is a curriculum sampler

    def __init__(
        self,
        steps: int,
        next_step: Callable[[], int],
        collector: Collector,
        deliver: Callable[[StepGroups], dict],
    ):
        self.steps, self.next_step, self.collector, self.deliver = steps, next_step, collector, deliver

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[dict]:
        while (step := self.next_step()) <= self.steps:
            yield self.deliver(self.collector.collect(step))

    def state_dict(self) -> dict:
        return self.collector.prompts.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.collector.prompts.load_state_dict(state)


class StoredRollouts:
    """Stands where `fit` expects its rollout manager: gives the stored answers of the step to `fit`.

    Validation batches, which nobody has generated, go to the manager itself.
    """

    def __init__(self, manager):
        self.manager = manager
        self.stored = None

    def generate_sequences(self, prompts):
        if prompts.meta_info.get("validate"):
            return self.manager.generate_sequences(prompts)
        stored, self.stored = self.stored, None
        if stored is None or len(stored) != len(prompts):
            have = "none" if stored is None else f"{len(stored)}"
            raise RuntimeError(f"verl's fit asks for {len(prompts)} answers, {have} are stored: fit has changed")
        return stored

    def __getattr__(self, name: str):
        return getattr(self.manager, name)


class Trend:
    """Says once per doubling that dynamic sampling needs more and more generations."""

    def __init__(self, limit: int):
        self.limit, self.mean, self.warned = limit, 0.0, max(2.0, limit / 4)

    def observe(self, step: int, generations: float) -> str | None:
        """Take in one step; a warning when the smoothed count passed the next threshold."""
        self.mean = generations if self.mean == 0 else 0.8 * self.mean + 0.2 * generations
        if self.mean <= self.warned:
            return None
        self.warned *= 2
        return (
            f"warning: step {step}: dynamic sampling needs {self.mean:.1f} generations per step (limit {self.limit}): "
            "the task is nearly solved or far too hard; harder or easier prompts would save that time"
        )
