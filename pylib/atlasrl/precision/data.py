"""Axis 2: did two runs see the same prompts, in the same order, as the same tokens?

Every step leaves in samples.jsonl which prompts it trained on (`<row>:<digest of question and right answer>`), a digest
of each prompt's tokens, and one of all answers. Two runs are compared over the first, middle and last steps that both
have: a difference at the start is of the data or the seed, one that begins later of what a run did in between.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from atlasrl.errors import Fault
from atlasrl.rundir import RunDir, read_json_lines

WINDOW = 10

EXPECTED = 10
"""Prompts that two orders of one data set should have in common by chance, for `none` to mean other data."""

Cause = Literal["content", "order", "shift", "selection", "tokens", "duplicates"]


@dataclass(frozen=True)
class Difference:
    """One way in which the data of two runs differ."""

    cause: Cause
    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Window:
    """Some steps of both runs."""

    name: str
    steps: tuple[int, ...]
    common: float
    """share of the prompts that both saw in these steps"""
    same_order: bool

    def __str__(self) -> str:
        span = f"{self.name} steps {self.steps[0]}–{self.steps[-1]}"
        if self.same_order:
            return f"{span}: the same prompts in the same order"
        return f"{span}: {self.common:.0%} of the prompts in common" + (
            ", in another order" if self.common == 1 else ""
        )


def samples(run: RunDir) -> dict[int, dict]:
    """The samples record of each step; of a step that several attempts trained, the last one's.

    Raises:
        Fault: the run has none.
    """
    records = {line["step"]: line for attempt in run.attempts() for line in read_json_lines(attempt.samples)}
    if not records:
        raise Fault(f"run {run.name} has no samples.jsonl: it has not finished a step, or is no run of this tool")
    return dict(sorted(records.items()))


def seed_of(run: RunDir) -> int | None:
    """The recipe's seed; None if the run has no plan."""
    try:
        return json.loads(run.plan.read_text())["recipe"]["seed"]
    except (OSError, ValueError, KeyError):
        return None


def compare(ours: dict[int, dict], theirs: dict[int, dict], *, same_seed: bool = True) -> list[Difference]:
    """What differs; empty when both runs saw the same.

    Args:
        same_seed: False: the order is expected to differ, and only which prompts there are can be told.

    Raises:
        Fault: no step in common.
    """
    found = []
    if same_seed:
        windows = compare_windows(ours, theirs)
        if (wrong := next((window for window in windows if not window.same_order), None)) is not None:
            found.append(_difference_in(wrong, ours, theirs, begins=windows.index(wrong) == 0))
    elif (stranger := _other_data(ours, theirs)) is not None:
        found.append(stranger)
    found += _tokens(ours, theirs)
    found += [
        Difference("duplicates", f"{name}: {words}")
        for name, records in (("this run", ours), ("the baseline", theirs))
        if (words := repeated(records))
    ]
    return found


def compare_windows(ours: dict[int, dict], theirs: dict[int, dict], size: int = WINDOW) -> list[Window]:
    """First, middle and last `size` common steps (fewer and fewer windows in short runs)."""
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        raise Fault(
            f"the runs have no step in common: one has {_span(ours)}, the other {_span(theirs)}; compare runs that "
            "began alike"
        )
    middle = max(0, (len(steps) - size) // 2)
    parts = {"first": steps[:size], "middle": steps[middle : middle + size], "last": steps[-size:]}
    windows = []
    for name, part in parts.items():
        if any(window.steps == tuple(part) for window in windows):
            continue
        left, right = _contents(ours, part), _contents(theirs, part)
        windows.append(Window(name, tuple(part), _share(left, right), left == right))
    return windows


def repeated(records: dict[int, dict]) -> str | None:
    """Whether rows of the data hold the same prompt again, as far as the steps show."""
    rows: dict[str, set[str]] = {}
    for record in records.values():
        for prompt in record["prompt_ids"]:
            row, _, content = prompt.partition(":")
            rows.setdefault(content, set()).add(row)
    most = max(rows.values(), key=len)
    if len(most) == 1:
        return None
    total = sum(map(len, rows.values()))
    return (
        f"{total} rows of the data hold {len(rows)} different prompts, one of them {len(most)} times; prompts are seen "
        "more often than epochs say; set data.deduplicate: true"
    )


def shift(ours: list[str], theirs: list[str]) -> int | None:
    """k ≠ 0 when `ours` is `theirs` from its k-th prompt on (k < 0: the other way round); None for no such k."""
    for sign, ahead, behind in ((1, theirs, ours), (-1, ours, theirs)):
        head = behind[: max(4, len(behind) // 4)]
        for start in range(1, len(ahead) - len(head) + 1):
            if ahead[start : start + len(head)] == head:
                overlap = min(len(ahead) - start, len(behind))
                if ahead[start : start + overlap] == behind[:overlap]:
                    return sign * start
    return None


def in_order(left: list[str], right: list[str]) -> float:
    """Share of neighbours among the common prompts of `left` that come in the same order in `right`."""
    place = {content: index for index, content in reversed(list(enumerate(right)))}
    places = [place[content] for content in dict.fromkeys(left) if content in place]
    pairs = list(zip(places, places[1:]))  # noqa: B905, RUF007  neighbours
    return sum(a < b for a, b in pairs) / len(pairs) if pairs else 0.0


def _other_data(ours: dict[int, dict], theirs: dict[int, dict]) -> Difference | None:
    """Runs of different seeds that have nothing in common although chance would give them something."""
    left, right = ({prompt for record in side.values() for prompt in record["prompt_ids"]} for side in (ours, theirs))
    rows = 1 + max(int(prompt.partition(":")[0]) for prompt in left | right)
    expected = len(left) * len(right) / rows
    contents = [{prompt.partition(":")[2] for prompt in side} for side in (left, right)]
    if expected < EXPECTED or contents[0] & contents[1]:
        return None
    return Difference(
        "content", f"no prompt in common, where one data set would give about {expected:.0f}: other data or template"
    )


def _difference_in(wrong: Window, ours: dict[int, dict], theirs: dict[int, dict], begins: bool) -> Difference:
    steps = sorted(ours.keys() & theirs.keys())
    left, right = _contents(ours, steps), _contents(theirs, steps)
    since = "from the first step on" if begins else f"by step {wrong.steps[-1]} (the first steps are the same)"
    if (moved := shift(left, right)) is not None:
        side = "ahead of" if moved > 0 else "behind"
        return Difference(
            "shift",
            f"this run is {abs(moved)} prompts {side} the baseline, {since}: a different batch size, a resume that "
            "skipped or repeated prompts, or dynamic sampling that drew more",
        )
    if (share := _share(left, right)) > 0:
        common = f"{share:.0%} of the prompts in common"
        if in_order(left, right) >= 0.9:
            return Difference(
                "selection",
                f"{common}, in the same order, {since}: the data agree, dynamic sampling kept other groups because "
                "accuracies differ",
            )
        return Difference("order", f"{common}, in another order, {since}: data.shuffle, the seed or the loader")
    return Difference("content", f"no prompt in common, {since}: other data, or questions rendered differently")


def _tokens(ours: dict[int, dict], theirs: dict[int, dict]) -> list[Difference]:
    left, right = _token_table(ours), _token_table(theirs)
    both = left.keys() & right.keys()
    other = sorted(content for content in both if left[content] != right[content])
    if not other:
        return []
    return [
        Difference(
            "tokens",
            f"{len(other)} of {len(both)} common prompts are the same text but other tokens (for example {other[0]}): "
            "the tokenizer or its chat template differs",
        )
    ]


def _token_table(records: dict[int, dict]) -> dict[str, str]:
    return {
        prompt.partition(":")[2]: tokens
        for record in records.values()
        for prompt, tokens in zip(record["prompt_ids"], record.get("prompt_tokens", ()))  # noqa: B905
    }


def _contents(records: dict[int, dict], steps: list[int]) -> list[str]:
    return [prompt.partition(":")[2] for step in steps for prompt in records[step]["prompt_ids"]]


def _share(left: list[str], right: list[str]) -> float:
    common = sum((Counter(left) & Counter(right)).values())
    return common / max(len(left), len(right), 1)


def _span(records: dict[int, dict]) -> str:
    return f"{min(records)}–{max(records)}"
