"""Reward of the tiny task in verl's form: +1 when the digit after the thought is right, else -1."""

from __future__ import annotations

THINKING = "."


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_) -> dict:
    """Score one response.

    Returns:
        `score` in {-1.0, 1.0}, from which verl's DAPO reward manager subtracts the overlong penalty, and `acc` in
        {0.0, 1.0}, which validation reports.
    """
    right = isinstance(solution_str, str) and solution_str.lstrip(THINKING) == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": float(right)}
