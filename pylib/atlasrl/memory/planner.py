"""Find splits that are legal and fit, rank them by estimated cost, and name remedies for one that does not fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from atlasrl.legality import RolloutSplit, Split, broken_rollout_rules, broken_rules
from atlasrl.memory import cost, model
from atlasrl.memory.activations import Recompute
from atlasrl.memory.architecture import Architecture
from atlasrl.memory.job import GIB, MIB, Job
from atlasrl.memory.model import Prediction

Batched = Callable[[Split], Job]  # the job with the micro-batches a split leaves to one rank

POWERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Candidate:
    prediction: Prediction
    seconds: dict[str, float]  # by cause

    @property
    def split(self) -> Split:
        return self.prediction.split

    @property
    def cost(self) -> float:
        return sum(self.seconds.values())


def search(a: Architecture, world: int, devices_per_node: int, batched: Batched) -> list[Candidate]:
    """All splits of `world` devices that are legal and fit, cheapest first. ETP stays 1, the rollout as in the job."""
    found = []
    for s, job in legal_splits(a, world, devices_per_node, batched):
        if (prediction := fitting(a, s, job)) is not None:
            found.append(Candidate(prediction, cost.step_seconds(a, s, job)))
    return sorted(found, key=lambda c: (c.cost, -c.prediction.spare))


def legal_splits(a: Architecture, world: int, devices_per_node: int, batched: Batched) -> Iterator[tuple[Split, Job]]:
    """Yield every legal split with its job; the micro-batches do not depend on the layers of the stages."""
    experts = POWERS if a.experts else (1,)
    for tensor, pipeline, expert, context in itertools.product((1, 2, 4, 8), POWERS, experts, (1, 2, 4)):
        replica = tensor * pipeline * context
        if world % replica or pipeline > a.layers:
            continue
        job = batched(Split(world, tensor, pipeline, expert, 1, context))
        for virtual, stages in itertools.product((1, 2), balanced_stages(a.layers, pipeline)):
            s = Split(world, tensor, pipeline, expert, 1, context, virtual, stages)
            if next(broken_rules(a, s, devices_per_node, job.sequence), None) is None:
                yield s, job


def balanced_stages(layers: int, pipeline: int) -> list[tuple[int, ...]]:
    """Layer lists Megatron can express: equal middle stages, ends of at most one layer more, ends differing by <= 2."""
    if pipeline == 1:
        return [(layers,)]
    if pipeline == 2:
        return sorted({(layers - layers // 2, layers // 2), (layers // 2, layers - layers // 2)})
    lists = set()
    for middle in range(1, layers // (pipeline - 2) + 1):
        ends = layers - middle * (pipeline - 2)
        for first in range(1, ends):
            last = ends - first
            if max(first, last) <= middle + 1 and abs(first - last) <= 2:
                lists.add((first, *[middle] * (pipeline - 2), last))
    return sorted(lists)


def fitting(a: Architecture, s: Split, j: Job) -> Prediction | None:
    """The prediction of a split that fits; without the stages that an earlier one exceeds (it has more in flight)."""
    shared = model.shared_terms(a, s, j)
    stages, seen, first = [], set(), 0
    for rank, layers in enumerate(s.stages):
        make = (layers, a.dense_among(first, first + layers), rank in (0, s.pipeline - 1))
        first += layers
        if make in seen:
            continue
        seen.add(make)
        stages.append(model.stage(a, s, j, rank, shared))
        if max(stages[-1].peaks.values()) > j.device:
            return None
    prediction = Prediction(s, j, tuple(stages), model.cache_tokens(a, j), {})
    return prediction if prediction.fits else None


@dataclass(frozen=True)
class Remedy:
    """One change: `saved` bytes of the tightest phase, `peak` afterwards over all phases, `seconds` more a step."""

    change: str
    saved: int
    peak: int
    fits: bool
    seconds: float


def remedies(a: Architecture, s: Split, batched: Batched) -> list[Remedy]:
    """Changes that lower the tightest phase: first those that make it fit, cheapest first."""
    return [remedy for remedy, _, _ in _evaluated(a, s, batched(s), batched)]


def combination(a: Architecture, s: Split, batched: Batched, limit: int = 5) -> list[Remedy]:
    """Remedies to take together, one after the other, until it fits; [] when `limit` of them do not suffice.

    Each next one is the cheapest that fits, else the one that lowers the highest peak most.
    """
    job, taken = batched(s), []
    for _ in range(limit):
        found = _evaluated(a, s, job, batched)
        if not found:
            return []
        remedy, s, job = found[0] if found[0][0].fits else min(found, key=lambda each: each[0].peak)
        taken.append(remedy)
        if remedy.fits:
            return taken
    return []


def _evaluated(a: Architecture, s: Split, job: Job, batched: Batched) -> list[tuple[Remedy, Split, Job]]:
    before = model.predict(a, s, job)
    stage, phase, peak = before.tightest
    base = sum(cost.step_seconds(a, s, job).values())
    found = []
    for change, split, changed in _changes(a, s, job, batched):
        after = model.predict(a, split, changed)
        same = after.stages[min(stage.rank, len(after.stages) - 1)].peaks[phase]
        same = same if split.stages == s.stages else max(each.peaks[phase] for each in after.stages)
        seconds = sum(cost.step_seconds(a, split, changed).values()) - base
        if peak - same >= 0.05 * GIB and after.sequences >= min(1, before.sequences):
            remedy = Remedy(change, peak - same, after.tightest[2], after.spare >= 0, seconds)
            found.append((remedy, split, changed))
    return sorted(found, key=lambda each: (not each[0].fits, each[0].seconds))


def _changes(a: Architecture, s: Split, j: Job, batched: Batched) -> Iterator[tuple[str, Split, Job]]:
    """Single changes of a job or its split, written as recipe keys."""

    def job(**fields) -> Job:
        return dataclasses.replace(j, **fields)

    if j.recompute.granularity != "full":
        yield "parallel.recompute=full", s, job(recompute=Recompute("full"))
    elif j.recompute.layers > 1:
        yield "parallel.recompute_layers=1", s, job(recompute=Recompute("full"))
    if j.recompute.granularity == "none":
        modules = frozenset({"layernorm", "mla_up_proj", "moe_act"} if a.latent else {"layernorm", "moe_act"})
        shown = ", ".join(sorted(modules))
        yield (
            f"parallel.recompute=selective ({shown})",
            s,
            job(recompute=Recompute("selective", modules=modules)),
        )
    if not j.offload:
        yield "parallel.offload=true", s, job(offload=True)
    if j.optimizer_on_host < 1:
        yield "parallel.optimizer_on_host=1.0", s, job(optimizer_on_host=1.0)
    if not j.distributed_optimizer:
        yield "parallel.distributed_optimizer=true", s, job(distributed_optimizer=True)
    if j.memory_fraction > 0.2:
        lower = round(j.memory_fraction - 0.1, 2)
        yield f"rollout.memory_fraction={lower}", s, job(memory_fraction=lower)
    if j.buffer > 100 * MIB:
        yield "environment.HCCL_BUFFSIZE=100", s, job(buffer=100 * MIB)
    if j.tokens // 2 >= j.sequence:
        half = job(tokens=j.tokens // 2, micro_batches=j.micro_batches * 2)
        yield "half of dapo.tokens_per_device or dapo.micro_batch_size", s, half
    yield from _other_splits(a, s, j, batched)
    yield from _other_rollouts(a, s, j)


def _rebatched(j: Job, of_split: Job) -> Job:
    """The job with the micro-batches that another split leaves to a rank."""
    return dataclasses.replace(j, tokens=of_split.tokens, micro_batches=of_split.micro_batches)


def _other_splits(a: Architecture, s: Split, j: Job, batched: Batched) -> Iterator[tuple[str, Split, Job]]:
    for key in ("tensor", "context", "expert"):
        wider = dataclasses.replace(s, **{key: getattr(s, key) * 2})
        if next(broken_rules(a, wider, j.devices_per_node, j.sequence), None) is None:
            yield f"parallel.{key}={getattr(wider, key)}", wider, _rebatched(j, batched(wider))
    for stages in balanced_stages(a.layers, s.pipeline * 2):
        deeper = dataclasses.replace(s, pipeline=s.pipeline * 2, stages=stages)
        if next(broken_rules(a, deeper, j.devices_per_node, j.sequence), None) is None:
            ends = f" first_stage_layers={stages[0]} last_stage_layers={stages[-1]}" if len(set(stages)) > 1 else ""
            yield f"parallel.pipeline={deeper.pipeline}{ends}", deeper, _rebatched(j, batched(deeper))
            return


def _other_rollouts(a: Architecture, s: Split, j: Job) -> Iterator[tuple[str, Split, Job]]:
    r = j.rollout
    wider = [("rollout.tensor", RolloutSplit(r.tensor * 2, r.expert if r.expert == 1 else max(r.expert, r.tensor * 2)))]
    if a.experts:
        wider.append(("rollout.expert", RolloutSplit(r.tensor, r.expert * 2 if r.expert > 1 else r.tensor * 2)))
    for key, split in wider:
        if next(broken_rollout_rules(a, split, s.world, j.devices_per_node), None) is None:
            value = split.tensor if key.endswith("tensor") else split.expert
            yield f"{key}={value}", s, dataclasses.replace(j, rollout=split)
