"""Reward of the smollm2-135m task in verl's form: reasoning-gym's own grader on the last number of the answer."""

from __future__ import annotations

import re
from functools import cache

LONGEST = 1000  # characters; an answer of 20 tokens has no more than a few hundred
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_) -> dict:
    """Score one response; `data_source` is `reasoning_gym/<task>`.

    Returns:
        `score`: 1.0 for the grader's full mark, else -1.0; `acc`: 1.0 or 0.0.
    """
    numbers = NUMBER.findall(solution_str) if isinstance(solution_str, str) and len(solution_str) <= LONGEST else []
    task = data_source.removeprefix("reasoning_gym/")
    right = bool(numbers) and grader(task)(numbers[-1], {"answer": ground_truth}) == 1.0
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


@cache
def grader(task: str):
    """reasoning-gym's `score_answer(answer, entry)` of a task."""
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
