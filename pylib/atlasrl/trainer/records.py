"""What a step leaves behind for later comparison: hashes of its samples, of its weights, and cheap alarms."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from atlasrl.precision.rollouts import tokens_digest

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Mean |log p(rollout) - log p(actor)| per answer token that rounding explains."""


def samples_record(step: int, ids: Sequence[str], answers, weights: str | None) -> dict:
    """One line of samples.jsonl.

    Args:
        ids: prompt ids of the step, in order.
        answers: DataProto with `responses` and `response_mask` (or `attention_mask`), [rows, tokens].
        weights: digest of the weights that generated the answers; None if the engine cannot tell.
    """
    return {
        "step": step,
        "prompts": _sha("\n".join(ids).encode()),
        "responses": _sha(_masked_responses(answers).numpy().tobytes()),
        "weights": weights,
        "prompt_ids": list(ids),
        "prompt_tokens": prompt_tokens(answers, len(ids)),
    }


def prompt_tokens(answers, prompts: int) -> list[str]:
    """Digest of each prompt's tokens: the same text under another template or tokenizer is told apart.

    Args:
        answers: DataProto, group-major, with `prompts` [rows, width] and `attention_mask` [rows, width + answer].
    """
    samples = max(1, len(answers.batch["prompts"]) // prompts)
    rows = answers.batch["prompts"][::samples]
    mask = answers.batch["attention_mask"][::samples, : rows.shape[1]].bool()
    return [tokens_digest(row[seen].tolist()) for row, seen in zip(rows, mask, strict=True)]


def append(path: Path, record: dict) -> None:
    """Add one whole line; a crash leaves at most a torn tail."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def log_prob_gap(batch) -> float | None:
    """Mean |log p(rollout) - log p(actor)| over answer tokens; None when the engine gives no log-probabilities."""
    if "rollout_log_probs" not in batch.batch or "old_log_probs" not in batch.batch:
        return None
    mask = batch.batch["response_mask"].bool()
    gap = (batch.batch["rollout_log_probs"] - batch.batch["old_log_probs"]).abs()
    return float(gap[mask].double().mean()) if mask.any() else 0.0


def log_prob_alarm(step: int, gap: float | None, compute_dtype: str) -> str | None:
    """A warning when rollout and actor no longer agree on the same weights."""
    limit = TOLERANCE[compute_dtype]
    if gap is None or gap <= limit:
        return None
    return (
        f"warning: step {step}: rollout and actor differ by {gap:.2e} in log-probability per token (rounding in "
        f"{compute_dtype} explains {limit:.0e}): replicas have diverged or weights did not reach the rollout; compare "
        "the weight digests in samples.jsonl and run bin/selftest"
    )


def _masked_responses(answers) -> torch.Tensor:
    responses = answers.batch["responses"]
    mask = answers.batch["attention_mask"][:, -responses.shape[1] :].bool()
    return torch.where(mask, responses, torch.full_like(responses, -1)).contiguous()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
