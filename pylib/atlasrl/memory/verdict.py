"""The answer for one recipe: legal or not, fits or not, and what would help. For the plan, preflight and bin/memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atlasrl.errors import UsageFault
from atlasrl.legality import Split, broken_batch_rules, broken_rollout_rules, broken_rules
from atlasrl.memory import cost, job, model, planner, report
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.model import Prediction
from atlasrl.memory.planner import Candidate, Remedy
from atlasrl.recipe import Recipe


@dataclass(frozen=True)
class Answer:
    prediction: Prediction
    remedies: list[Remedy]  # cheapest first
    together: list[Remedy]  # to take one after the other until it fits, when no single one suffices


@dataclass(frozen=True)
class Ranking:
    found: list[Candidate]  # cheapest first
    own: Candidate | None  # the recipe's split, when it fits


def of_recipe(
    recipe: Recipe, nodes: int | None = None, config: Path | None = None, device_gib: float | None = None
) -> Answer:
    """Predict a recipe's memory on `nodes` nodes.

    Args:
        config: a config.json, when the model's folder is not on this machine and the model not a published one.
        device_gib: memory of one device instead of the usual one of its kind.

    Raises:
        UsageFault: the split is illegal (all broken rules in one line), or the model or device is unknown.
    """
    a, split, j = _described(recipe, nodes, config, device_gib)
    if broken := [*illegal(recipe, a, split, j)]:
        raise UsageFault("; ".join(broken))

    def batched(s: Split) -> job.Job:
        return job.batched(j, recipe, s)

    prediction, remedies = model.predict(a, split, j), planner.remedies(a, split, batched)
    alone = prediction.spare >= 0 or any(remedy.fits for remedy in remedies)
    return Answer(prediction, remedies, [] if alone else planner.combination(a, split, batched))


def in_one_line(recipe: Recipe, nodes: int, devices_per_node: int) -> tuple[str, bool | None]:
    """What a plan says about memory: a sentence, and whether it fits (None: nothing is known, so nothing stops it).

    For a Megatron recipe whose split is illegal the sentence names the rules and the answer is False.
    """
    recipe = recipe.model_copy(update={"devices_per_node": devices_per_node})
    if recipe.backend != "megatron" or recipe.device not in job.DEVICE_BYTES:
        return f"not predicted for {recipe.backend} on {recipe.device}", None
    try:
        a = job.architecture_of(recipe)
    except UsageFault as unknown:
        return f"not predicted: {unknown}", None
    split, j = job.of_recipe(recipe, a, nodes)
    if broken := illegal(recipe, a, split, j):
        return f"the split is illegal: {'; '.join(broken)}", False
    prediction = model.predict(a, split, j)
    return report.verdict(prediction), prediction.fits


def illegal(recipe: Recipe, a: Architecture, split: Split, j: job.Job) -> list[str]:
    """Every rule of training, rollout and batches that the recipe breaks."""
    per_node = recipe.devices_per_node
    training = [*broken_rules(a, split, per_node, j.sequence)]
    batches = [] if training else [*broken_batch_rules(recipe, split.data)]
    return [*training, *broken_rollout_rules(a, j.rollout, split.world, per_node), *batches]


def ranked(
    recipe: Recipe, nodes: int | None = None, config: Path | None = None, device_gib: float | None = None
) -> Ranking:
    """Search all splits of the recipe's devices. Raises as `of_recipe`, but an illegal training split is no matter."""
    a, split, j = _described(recipe, nodes, config, device_gib)
    if broken := [*broken_rollout_rules(a, j.rollout, split.world, recipe.devices_per_node)]:
        raise UsageFault("; ".join(broken))
    found = planner.search(a, split.world, recipe.devices_per_node, lambda s: job.batched(j, recipe, s))
    own = next((c for c in found if c.split == split), None)
    if own is None and not illegal(recipe, a, split, j):
        prediction = model.predict(a, split, j)
        if prediction.fits:  # legal and fitting, but outside of what the search tries, such as ETP 2
            own = Candidate(prediction, cost.step_seconds(a, split, j))
            found = sorted([*found, own], key=lambda c: c.cost)
    return Ranking(found, own)


def _described(
    recipe: Recipe, nodes: int | None, config: Path | None, device_gib: float | None
) -> tuple[Architecture, Split, job.Job]:
    if recipe.backend != "megatron":
        raise UsageFault(f"backend {recipe.backend} is not split; `bin/memory RECIPE` tells what its workers hold")
    a = job.architecture_of(recipe, config)
    return a, *job.of_recipe(recipe, a, nodes, int(device_gib * job.GIB) if device_gib else None)
