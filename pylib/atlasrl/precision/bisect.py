"""Two dumps of one input: logits first, then the first module that makes something wrong of what is right."""

from __future__ import annotations

import math
from collections import defaultdict
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
LEAP = 4  # a call that carries a difference on makes at most so much more of it; one that is wrong makes it anew

Pair = tuple[Call, Call]
"""A call on both sides."""


@dataclass
class Finding:
    """Where two dumps part. `culprit` is None when they agree; `why` says what was seen."""

    culprit: str | None
    why: str
    comparisons: int = 0
    facts: list[str] = field(default_factory=list)


class Comparison:
    """Compares records of two dumps, each pair once."""

    def __init__(self, left: Dump, right: Dump):
        self.left, self.right = left, right
        self.known: dict[tuple[int, int], float] = {}

    def error(self, left: Record, right: Record) -> float:
        """Relative distance of two tensors: the larger of that of their slices and that of their norms."""
        pair = id(left), id(right)
        if pair not in self.known:
            self.known[pair] = self._error(left, right)
        return self.known[pair]

    def _error(self, left: Record, right: Record) -> float:
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

    def excess(self, left: list[Record], right: list[Record]) -> float:
        """The largest error among pairs of tensors, in units of its tolerance: above 1 rounding does not explain it."""
        if len(left) != len(right):
            return math.inf
        return max((self.error(a, b) / tolerance(a, b) for a, b in zip(left, right, strict=True)), default=0.0)

    def given(self, pair: Pair) -> float:
        """The excess of a call's input."""
        return self.excess(pair[0].inputs, pair[1].inputs)

    def made(self, pair: Pair) -> float:
        """The excess of a call's output. Near a tie rounding makes another choice, which only other weights explain."""
        if pair[0].choice != pair[1].choice:
            return math.inf if self.other_weights(pair[0]) else 0.0
        return self.excess(pair[0].outputs, pair[1].outputs)

    def other_weights(self, call: Call) -> list[str]:
        """The call's own weights that differ between the sides."""
        sides = self.left.weights, self.right.weights
        own = [name for name in sides[0] if name.rpartition(".")[0] == call.module and name in sides[1]]
        return [name for name in own if self.excess([sides[0][name]], [sides[1][name]]) > 1]


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
    top = _top(left), _top(right)
    if comparison.made(top) > 1:
        narrowed = _narrow(comparison, top)
        found = _leap(comparison, narrowed) or _leap(comparison, top) or _unexplained(top)
    else:  # later modules can shrink a wrong output below the tolerance of the logits, so every call is asked
        found = _leap(comparison, top) or _gradients(comparison, left, right)
    return Finding(*(found or (None, "outputs and gradients agree within rounding")), len(comparison.known), facts)


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


def _top(dump: Dump) -> Call:
    """The outermost call; several are put inside one."""
    roots = dump.roots
    return roots[0] if len(roots) == 1 else Call("(model)", "model", roots[0].inputs, roots[-1].outputs, roots)


def _narrow(comparison: Comparison, pair: Pair) -> Pair:
    """Bisect to the innermost call that makes a right input wrong.

    A bisection takes for granted that what is wrong stays wrong. Where a difference shrank and grew again it ends at a
    call whose input was off already; then the call around it is returned.
    """
    while True:
        inner = _pairs(pair)
        found = first(len(inner), lambda index, inner=inner: comparison.made(inner[index]) > 1)
        if found is None or not _leaps(comparison.made(inner[found]), comparison.given(inner[found])):
            return pair
        pair = inner[found]


def _leap(comparison: Comparison, pair: Pair) -> tuple[str, str] | None:
    """The first call, in the order of execution, that makes something wrong of what is right; each is asked.

    Returns:
        Its module and why it is the one; None if differences only grow from one call to the next.
    """
    module, kind = pair[0].module, pair[0].kind
    before, is_alike = comparison.given(pair), _is_alike(pair)
    for each in _pairs(pair):
        if is_alike and _leaps(comparison.given(each), before):
            return module, (
                f"what it passes to {each[0].module} differs and all modules before agree: the arithmetic of {kind} "
                "itself (in attention: scores, scale, mask, rotary embedding)"
            )
        if found := _leap(comparison, each):
            return found
        before = max(before, comparison.made(each))
    if is_alike and _leaps(comparison.made(pair), before):
        return module, _own(comparison, pair[0])
    return None


def _leaps(now: float, before: float) -> bool:
    return now > max(1, LEAP * before)


def _pairs(pair: Pair) -> list[Pair]:
    """The calls inside both, each with its counterpart; experts that got other tokens have none."""
    theirs = defaultdict(list)
    for call in reversed(pair[1].children):
        theirs[call.module].append(call)
    inner = [(call, theirs[call.module].pop()) for call in pair[0].children if theirs[call.module]]
    return [each for each in inner if _shapes(each[0]) == _shapes(each[1])]


def _is_alike(pair: Pair) -> bool:
    """Whether both sides called the same modules, with the same shapes, and none made another choice."""
    inner = _pairs(pair)
    calls_the_same = len(inner) == len(pair[0].children) == len(pair[1].children)
    return calls_the_same and all(left.choice == right.choice for left, right in inner)


def _shapes(call: Call) -> list[tuple[int, ...]]:
    return [record.shape for record in (*call.inputs, *call.outputs)]


def _unexplained(top: Pair) -> tuple[str, str]:
    """The outputs differ, and no call made them so: it calls others, or rounding is all there is."""
    pending = [top]
    while pending:
        pair = pending.pop(0)
        if not _is_alike(pair):
            return pair[0].module, (
                f"{pair[0].kind} calls other modules, or for other tokens, on the two sides: other code, or a router "
                "near a tie, behind which nothing smaller is seen; dump both sides with --dtype float32"
            )
        pending = [*_pairs(pair), *pending]
    return top[0].module, (
        "its output differs, but no module makes a right input wrong: differences grow from each to the next, as other "
        "kernels or dtypes do; dump both sides with --dtype float32"
    )


def _own(comparison: Comparison, call: Call) -> str:
    """Why a call with right inputs and right inner modules is wrong: its weights, or its arithmetic."""
    if wrong := comparison.other_weights(call):
        return f"its input agrees, its weights differ: {', '.join(wrong)}"
    inside = "every module inside it" if call.children else "its weights"
    return f"its input and {inside} agree: the arithmetic of {call.kind} itself"


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
