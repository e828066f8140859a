"""The task: say the first digit of a number. `4917` -> 4."""

from __future__ import annotations

import random

DIGITS = "0123456789"
THINKING = "."  # what the base model writes before its answer: a stand-in for a chain of thought
LONGEST_THOUGHT = 9


def pose(rng: random.Random) -> tuple[str, str]:
    """Draw a question of three to five digits and its right answer."""
    number = "".join(rng.choice(DIGITS) for _ in range(rng.randint(3, 5)))
    return number, number[0]


def pose_distinct(count: int, rng: random.Random, taken: set[str]) -> list[tuple[str, str]]:
    """Draw `count` questions that are not in `taken`, and add them to it."""
    drawn: list[tuple[str, str]] = []
    while len(drawn) < count:
        question, answer = pose(rng)
        if question not in taken:
            taken.add(question)
            drawn.append((question, answer))
    return drawn


def answer_like_the_corpus(answer: str, right_share: float, rng: random.Random) -> str:
    """A response of the warm-up corpus: a thought of random length, then the answer or, mostly, any digit."""
    said = answer if rng.random() < right_share else rng.choice(DIGITS)
    return THINKING * rng.randint(0, LONGEST_THOUGHT) + said
