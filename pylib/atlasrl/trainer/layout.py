"""How the actor is split over workers, and which splits were proven exact on a CPU.

A split is proven when `bin/selftest` finds every gradient and every updated parameter equal to those of an independent
single-process reference. `tests/megatron/test_layouts.py` runs the table below.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlasrl.errors import UsageFault


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups. The product tensor × pipeline × context × data is the number of workers."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    data: int = 1

    @property
    def workers(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def name(self) -> str:
        """For people: "DP2 TP2 EP2"; a single worker is "DP1"."""
        sizes = (
            ("DP", self.data),
            ("TP", self.tensor),
            ("PP", self.pipeline),
            ("CP", self.context),
            ("EP", self.expert),
            ("ETP", self.expert_tensor),
        )
        return " ".join(f"{word}{size}" for word, size in sizes if size > 1) or "DP1"


PROVEN = tuple(
    Layout(**sizes)
    for sizes in (
        {},
        {"data": 2},
        {"data": 2, "expert": 2},
        {"pipeline": 2},
        {"tensor": 2, "expert_tensor": 2},
        {"tensor": 2, "expert": 2},
        {"data": 4},
        {"data": 4, "expert": 2},
        {"data": 2, "pipeline": 2},
        {"data": 2, "pipeline": 2, "expert": 2},
        {"data": 2, "tensor": 2, "expert_tensor": 2},
        {"data": 2, "tensor": 2, "expert": 2},
        {"tensor": 2, "pipeline": 2, "expert_tensor": 2},
        {"tensor": 2, "pipeline": 2, "expert": 2},
    )
)
"""Each with the plain and with the distributed optimizer.

TP2 with whole experts on every rank (EP1 ETP1) is missing: megatron-core's torch experts then reduce-scatter tokens
as if they were a sequence."""


def of_recipe(recipe, workers: int) -> Layout:
    """The layout of a recipe's Megatron actor on `workers` workers.

    Raises:
        UsageFault: the sizes do not divide the number of workers; the message has the arithmetic.
    """
    split = recipe.parallel
    model_size = split.tensor * split.pipeline * split.context
    if workers % model_size:
        raise UsageFault(
            f"parallel: tensor {split.tensor} × pipeline {split.pipeline} × context {split.context} = {model_size} "
            f"does not divide {workers} workers (nodes × devices_per_node)"
        )
    expert_size = split.expert * split.expert_tensor * split.pipeline
    if workers % expert_size:
        raise UsageFault(
            f"parallel: expert {split.expert} × expert_tensor {split.expert_tensor} × pipeline {split.pipeline} = "
            f"{expert_size} does not divide {workers} workers (nodes × devices_per_node)"
        )
    return Layout(
        tensor=split.tensor,
        pipeline=split.pipeline,
        expert=split.expert,
        expert_tensor=split.expert_tensor,
        context=split.context,
        data=workers // model_size,
    )


def require_proven(layout: Layout) -> None:
    """Refuse a layout that no self-test has proven on a CPU.

    Raises:
        UsageFault: names the nearest proven layout for the same number of workers, or all of them.
    """
    if layout in PROVEN:
        return
    same_size = [known for known in PROVEN if known.workers == layout.workers] or list(PROVEN)
    nearest = min(same_size, key=lambda known: _distance(known, layout))
    raise UsageFault(
        f"parallel: {layout.name} on {layout.workers} workers is not proven exact on a CPU; the nearest proven layout "
        f"is {nearest.name} ({', '.join(f'parallel.{k}={v}' for k, v in _keys(nearest).items())} on {nearest.workers} "
        f"workers). `bin/selftest {flags(layout)}` tests this one"
    )


def flags(layout: Layout) -> str:
    """The options of `bin/selftest` for a layout."""
    words = {"tp": layout.tensor, "pp": layout.pipeline, "ep": layout.expert, "etp": layout.expert_tensor}
    shown = " ".join(f"--{word} {size}" for word, size in words.items() if size > 1)
    return f"--backend megatron --dp {layout.data} {shown}".strip()


def _keys(layout: Layout) -> dict[str, int]:
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "expert": layout.expert,
        "expert_tensor": layout.expert_tensor,
    }


def _distance(a: Layout, b: Layout) -> int:
    return sum(abs(getattr(a, name) - getattr(b, name)) for name in Layout.__dataclass_fields__)
