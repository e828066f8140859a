"""Which parallel splits a model and a cluster allow: pure rules, shared by memory planner and configuration lint.

Sources: Megatron-core 0.12.1 (`parallel_state.initialize_model_parallel`, `transformer_config.__post_init__`,
`transformer_block.get_num_layers_to_build`), verl 0.7.0 (`vllm_async_server.py`, `RolloutConfig.__post_init__`,
`ray_trainer._validate_config`). Every rule answers with one sentence, so a caller can print all that is wrong at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlasrl.memory.architecture import Architecture
    from atlasrl.recipe import Recipe


@dataclass(frozen=True)
class Split:
    """How training divides a model over `world` devices. `stages` holds the layers of every pipeline stage."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    virtual: int = 1
    stages: tuple[int, ...] = ()

    @property
    def data(self) -> int:
        """Data-parallel replicas of the dense part."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Data-parallel replicas of a routed expert."""
        return self.world // (self.expert_tensor * self.expert * self.pipeline)

    def __str__(self) -> str:
        parts = [f"TP{self.tensor}", f"PP{self.pipeline}", f"EP{self.expert}"]
        parts += [f"ETP{self.expert_tensor}"] if self.expert_tensor > 1 else []
        parts += [f"CP{self.context}"] if self.context > 1 else []
        parts += [f"VPP{self.virtual}"] if self.virtual > 1 else []
        if len(set(self.stages)) > 1:
            first, last = self.stages[0], self.stages[-1]
            middle = f"/{self.stages[1]}x{len(self.stages) - 2}" if len(self.stages) > 2 else ""
            parts.append(f"[{first}{middle}/{last}]")
        return " ".join(parts)


@dataclass(frozen=True)
class RolloutSplit:
    """How generation divides the model: vLLM puts the experts over tensor × data ranks when `expert` > 1."""

    tensor: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Devices of one replica."""
        return max(self.tensor, self.expert)


def stage_layers(layers: int, pipeline: int, first: int | None = None, last: int | None = None) -> tuple[int, ...]:
    """Layers of every stage: `first` and `last` as given, the rest divided evenly. () when that is impossible."""
    if pipeline == 1:
        return (layers,) if first in (None, layers) and last in (None, layers) else ()
    ends = [n for n in (first, last) if n is not None]
    rest, stages = layers - sum(ends), pipeline - len(ends)
    if rest < 0 or (rest % stages if stages else rest):
        return ()
    middle = rest // stages if stages else 0
    if stages and middle == 0:
        return ()
    head, tail = ([] if first is None else [first]), ([] if last is None else [last])
    return (*head, *[middle] * stages, *tail)


def broken_rules(a: Architecture, s: Split, devices_per_node: int, sequence: int = 0) -> Iterator[str]:
    """Yield one sentence for every rule of training that the split breaks.

    `sequence` is the longest prompt + response in tokens; 0 leaves its rule out.
    """
    replica = s.tensor * s.pipeline * s.context
    if s.world % replica:
        yield f"{s.world} devices are no multiple of TP x PP x CP = {s.tensor} x {s.pipeline} x {s.context} = {replica}"
    if a.experts is None:
        if s.expert > 1 or s.expert_tensor > 1:
            yield f"EP {s.expert} and ETP {s.expert_tensor} need a mixture of experts; {a.family} has none"
    else:
        experts = s.expert * s.expert_tensor * s.pipeline
        if s.world % experts:
            sizes = f"{s.expert} x {s.expert_tensor} x {s.pipeline} = {experts}"
            yield f"{s.world} devices are no multiple of EP x ETP x PP = {sizes}"
        if a.experts.count % s.expert:
            yield f"{a.experts.count} experts are no multiple of EP {s.expert}"
        if a.experts.width % s.expert_tensor:
            yield f"expert width {a.experts.width} is no multiple of ETP {s.expert_tensor}"
    yield from _tensor_rules(a, s.tensor, "TP")
    if a.latent is None and a.kv_heads % s.tensor and s.tensor > 1:
        yield f"{a.kv_heads} key-value heads are no multiple of TP {s.tensor}"
    if s.tensor > devices_per_node:
        yield f"TP {s.tensor} crosses nodes of {devices_per_node} devices; it needs the fast links inside one"
    if s.context > 1 and sequence % (2 * s.context):
        yield f"prompt + response = {sequence} tokens are no multiple of 2 x CP = {2 * s.context}"
    yield from _pipeline_rules(a, s)


def _tensor_rules(a: Architecture, tensor: int, name: str) -> Iterator[str]:
    for what, size in (
        ("attention heads", a.heads),
        ("vocabulary", a.vocabulary),
        ("hidden size", a.hidden),
        ("intermediate size", a.intermediate),
    ):
        if size % tensor:
            yield f"{what} {size} is no multiple of {name} {tensor}"


def _pipeline_rules(a: Architecture, s: Split) -> Iterator[str]:
    if len(s.stages) != s.pipeline or sum(s.stages) != a.layers or min(s.stages, default=0) < 1:
        shown = f"{len(s.stages)} stages of together {sum(s.stages)}" if s.stages else "no whole number"
        yield (
            f"{a.layers} layers do not divide over PP {s.pipeline} ({shown}); set first_stage_layers and "
            "last_stage_layers so that the rest divides evenly"
        )
        return
    if s.virtual > 1:
        if s.pipeline == 1:
            yield f"VPP {s.virtual} needs PP > 1"
        for layers in sorted(set(s.stages)):
            if layers % s.virtual:
                yield f"a stage of {layers} layers is no multiple of VPP {s.virtual}"


def broken_rollout_rules(a: Architecture, r: RolloutSplit, world: int, devices_per_node: int) -> Iterator[str]:
    """Yield one sentence for every rule of generation that the split breaks."""
    if world % r.ranks:
        yield f"{world} devices are no multiple of the {r.ranks} devices of one rollout replica"
    yield from _tensor_rules(a, r.tensor, "rollout TP")
    if a.latent is None and max(a.kv_heads, r.tensor) % min(a.kv_heads, r.tensor):
        yield f"{a.kv_heads} key-value heads and rollout TP {r.tensor} do not divide each other"
    if devices_per_node % r.tensor:
        yield f"rollout TP {r.tensor} does not divide the {devices_per_node} devices of a node"
    if r.expert > 1:
        if a.experts is None:
            yield f"rollout EP {r.expert} needs a mixture of experts; {a.family} has none"
        elif a.experts.count % r.expert:
            yield f"{a.experts.count} experts are no multiple of rollout EP {r.expert}"
        if r.expert % r.tensor:
            yield f"rollout EP {r.expert} is no multiple of rollout TP {r.tensor} (verl: EP = TP x DP)"


def broken_batch_rules(recipe: Recipe, data: int) -> Iterator[str]:
    """Yield one sentence for every batch size that does not divide over `data` data-parallel ranks."""
    dapo, samples = recipe.dapo, recipe.rollout.samples
    if dapo.train_batch_size * samples % data:
        yield f"train_batch_size {dapo.train_batch_size} x {samples} answers are no multiple of DP {data}"
    if dapo.mini_batch_size * samples % data:
        yield f"mini_batch_size {dapo.mini_batch_size} x {samples} answers are no multiple of DP {data}"
    elif dapo.tokens_per_device is None and dapo.mini_batch_size * samples // data % dapo.micro_batch_size:
        share = dapo.mini_batch_size * samples // data
        yield f"{share} answers a rank and optimizer step are no multiple of micro_batch_size {dapo.micro_batch_size}"
    longest = recipe.data.max_prompt_tokens + recipe.data.max_response_tokens
    if dapo.tokens_per_device and dapo.tokens_per_device * recipe.parallel.context < longest:
        yield (
            f"tokens_per_device {dapo.tokens_per_device} x CP {recipe.parallel.context} is less than the longest "
            f"answer with its prompt, {longest}"
        )
    if dapo.train_batch_size % dapo.mini_batch_size:
        yield f"train_batch_size {dapo.train_batch_size} is no multiple of mini_batch_size {dapo.mini_batch_size}"


def split_of(recipe: Recipe, a: Architecture, nodes: int | None = None) -> Split:
    """The training split that a recipe asks for; `nodes` replaces the recipe's own number."""
    p = recipe.parallel
    return Split(
        world=(nodes or recipe.nodes) * recipe.devices_per_node,
        tensor=p.tensor,
        pipeline=p.pipeline,
        expert=p.expert,
        expert_tensor=p.expert_tensor,
        context=p.context,
        virtual=p.virtual_pipeline,
        stages=stage_layers(a.layers, p.pipeline, p.first_stage_layers, p.last_stage_layers),
    )
