"""Two dumps of one input: logits and gradient norm first, then the first module that leaves its tolerance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from atlasrl.errors import Fault
from atlasrl.precision.dumps import Call, Dump, Record

TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative error that rounding explains in the output of a module, by the coarser of both dtypes.

Unit roundoff (6e-8, 5e-4, 4e-3) times what sums of thousands of terms in another order and 60 layers of residual
stream add up to; trainer/records.py allows the same between rollout and training.
"""
ROUNDOFF = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}
SMALL = 1e-12
GRADIENT = 4  # a gradient has been through the model twice: so many times the tolerance of an output
FAINT = 1e-3  # of the largest gradient: below it is rounding, as the gradient of a key's bias, which is zero


@dataclass
class Finding:
    """Where two dumps part. `culprit` is None when they agree; `why` says what was seen."""

    culprit: str | None
    why: str
    comparisons: int = 0
    facts: list[str] = field(default_factory=list)


class Comparison:
    """Compares records of two dumps and counts how often."""

    def __init__(self, left: Dump, right: Dump):
        self.left, self.right, self.count = left, right, 0

    def error(self, left: Record, right: Record) -> float:
        """Relative distance of two tensors: the larger of that of their slices and that of their norms."""
        self.count += 1
        if left.shape != right.shape:
            return math.inf
        if left.bad or right.bad:
            return 0.0 if left.bad == right.bad else math.inf
        scale = max(abs(left.norm), abs(right.norm), SMALL)
        found = abs(left.norm - right.norm) / scale
        slices = self.left.sample(left), self.right.sample(right)
        if None in (left.line, right.line) or len(slices[0]) != len(slices[1]):
            spread = max(abs(left.high), abs(left.low), abs(right.high), abs(right.low), SMALL)
            return max(found, *(abs(getattr(left, n) - getattr(right, n)) / spread for n in ("low", "high", "mean")))
        size = max(slices[0].double().norm().item(), slices[1].double().norm().item(), SMALL)
        return max(found, (slices[0].double() - slices[1].double()).norm().item() / size)

    def differs(self, left: list[Record], right: list[Record]) -> bool:
        """Whether any tensor of two calls leaves its tolerance."""
        if len(left) != len(right):
            return True
        return any(self.error(a, b) > tolerance(a, b) for a, b in zip(left, right, strict=True))


def tolerance(left: Record, right: Record) -> float:
    """The tolerance of a pair: that of the coarser dtype."""
    coarser = max((left.dtype, right.dtype), key=lambda dtype: ROUNDOFF.get(dtype, 1))
    return TOLERANCE.get(coarser, TOLERANCE["float32"])


def first(count: int, is_bad: Callable[[int], bool]) -> int | None:
    """The first of `count` that is bad, if all after it are; ⌈log2(count)⌉ + 1 questions. None: the last is good."""
    if not count or not is_bad(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if is_bad(middle):
            high = middle
        else:
            low = middle + 1
    return low


def compare(left: Dump, right: Dump) -> Finding:
    """Find the module that makes two dumps differ.

    Raises:
        Fault: the dumps are of different inputs or of different models.
    """
    _check_comparable(left, right)
    comparison = Comparison(left, right)
    facts = [f"{name}: {left.facts[name]:.6g} | {right.facts[name]:.6g}" for name in ("loss", "grad_norm")
             if isinstance(left.facts.get(name), float) and isinstance(right.facts.get(name), float)]  # fmt: skip
    top = [
        each.roots[0] if len(each.roots) == 1 else Call("(model)", "model", [], [], each.roots)
        for each in (left, right)
    ]
    finding = None
    if not top[0].outputs or comparison.differs(top[0].outputs, top[1].outputs):
        finding = _descend(comparison, *top, _bisected)
    if finding is None and (gradient := _gradients(comparison, left, right)) is not None:
        # The residual stream can bury a wrong layer below the tolerance of the logits: ask each call.
        finding = _descend(comparison, *top, _scanned) or gradient
    return Finding(*(finding or (None, "outputs and gradients agree within rounding")), comparison.count, facts)


def _check_comparable(left: Dump, right: Dump) -> None:
    inputs = left.facts.get("inputs"), right.facts.get("inputs")
    if None not in inputs and inputs[0] != inputs[1]:
        raise Fault(
            f"{left.folder} and {right.folder} saw other inputs ({inputs[0]}, {inputs[1]}); dump both with the same "
            "recorded rollout and step"
        )
    for dump in (left, right):
        if dump.facts.get("complete") is False:
            raise Fault(
                f"{dump.folder} left out {dump.facts['left_out']} tensors beyond its bound of {dump.facts['limit']} "
                "bytes; dump again with a larger --limit or a smaller --sample"
            )
    if not left.roots or not right.roots:
        raise Fault(
            f"{left.folder if not left.roots else right.folder} holds no module call; allow the dump more bytes"
        )


def _descend(comparison: Comparison, left: Call, right: Call, first_wrong: Callable) -> tuple[str, str] | None:
    """Follow the wrong output of a call, whose input is right, to the innermost call that makes it wrong.

    Args:
        first_wrong: `_bisected`, or `_scanned` where later calls may be right again.
    """
    while True:
        pairs = list(itertools.takewhile(_is_same_call, zip(left.children, right.children, strict=False)))
        found = first_wrong(comparison, pairs)
        if found is None and len(pairs) < max(len(left.children), len(right.children)):
            return left.module, f"{left.kind} calls other modules on the two sides: other experts, or other code"
        if found is None:
            return (left.module, _own(comparison, left)) if _is_wrong(comparison, (left, right)) else None
        if comparison.differs(pairs[found][0].inputs, pairs[found][1].inputs):
            earlier = _scanned(comparison, pairs[:found])
            if earlier is None:
                return left.module, (
                    f"what it passes to {pairs[found][0].module} differs and all modules before agree: the arithmetic "
                    f"of {left.kind} itself (in attention: scores, scale, mask, rotary embedding)"
                )
            found = earlier
        left, right = pairs[found]


def _is_same_call(pair: tuple[Call, Call]) -> bool:
    return pair[0].module == pair[1].module


def _is_wrong(comparison: Comparison, pair: tuple[Call, Call]) -> bool:
    return comparison.differs(pair[0].outputs, pair[1].outputs)


def _bisected(comparison: Comparison, pairs: list[tuple[Call, Call]]) -> int | None:
    """The first call with a wrong output. Where the last is right, a branch may still be wrong: each is asked."""
    found = first(len(pairs), lambda index: _is_wrong(comparison, pairs[index]))
    return _scanned(comparison, pairs[:-1]) if found is None else found


def _scanned(comparison: Comparison, pairs: list[tuple[Call, Call]]) -> int | None:
    """The first call with a wrong output, each asked in turn."""
    return next((index for index, pair in enumerate(pairs) if _is_wrong(comparison, pair)), None)


def _own(comparison: Comparison, call: Call) -> str:
    """Why a call with right inputs and right inner modules is wrong: its weights, or its arithmetic."""
    sides = comparison.left.weights, comparison.right.weights
    own = [n for n in sides[0] if n.rpartition(".")[0] == call.module and n in sides[1]]
    wrong = [name for name in own if comparison.differs([sides[0][name]], [sides[1][name]])]
    if wrong:
        return f"its input agrees, its weights differ: {', '.join(wrong)}"
    inside = " and every module inside it" if call.children else " and its weights" if own else ""
    return f"its input{inside} agree{'' if inside else 's'}: the arithmetic of {call.kind} itself"


def _gradients(comparison: Comparison, left: Dump, right: Dump) -> tuple[str, str] | None:
    """With equal outputs: the first parameter, seen from the loss, whose gradient differs."""
    known = {each.module: each for each in right.gradients}
    floor = FAINT * max((each.norm for each in left.gradients), default=0.0)
    for ours in left.gradients:
        theirs = known.get(ours.module)
        if theirs is None or max(ours.norm, theirs.norm) < floor:
            continue
        if comparison.error(ours, theirs) > GRADIENT * tolerance(ours, theirs):
            return ours.module, "outputs agree; this is the first gradient, seen from the loss, that differs"
    return None


def text(left: Dump, right: Dump, finding: Finding) -> str:
    """The finding for a person."""
    lines = [f"left   {left.folder}", f"right  {right.folder}", *finding.facts]
    verdict = f"first difference: {finding.culprit}" if finding.culprit else "no difference"
    return "\n".join([*lines, verdict, f"    {finding.why}", f"    {finding.comparisons} comparisons"])
