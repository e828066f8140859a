"""Sample answers to a batch of prompts with one model on a CPU, reproducibly.

Every answer has its own seed, so that a token depends on the weights, the prompt and the seed, not on a generator
that other answers have advanced. (Rounding still depends on the rows computed together.) Equal prompts are read once;
rows that have ended leave the batch, so that a few long answers do not cost as much as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atlasrl.trainer.cpu.attention import RoomyCache

CACHE_BYTES = 1 << 30
"""Keys and values held at a time; more rows are generated one chunk after the other."""

SHRINK = 8
"""The batch is repacked when one row in SHRINK has ended."""


@dataclass(frozen=True)
class Decoding:
    max_new_tokens: int
    temperature: float
    """0: always the likeliest token"""
    top_p: float
    stop: frozenset[int]
    pad: int


@dataclass
class Answer:
    tokens: list[int]
    """with the stop token, if one was reached"""
    log_probs: list[float]
    """of each token under the model at this temperature, before top-p"""


@torch.inference_mode()
def generate(model, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding) -> list[Answer]:
    """One answer per prompt, in order."""
    answers = [Answer([], []) for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), tuple(prompts[row]), row))
    limit = rows_at_a_time(model, max(map(len, prompts), default=0) + decoding.max_new_tokens)
    for start in range(0, len(by_length), limit):
        _generate_chunk(model, by_length[start : start + limit], prompts, seeds, decoding, answers)
    return answers


def rows_at_a_time(model, tokens: int) -> int:
    """How many rows of `tokens` tokens fit into CACHE_BYTES."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if latent := getattr(config, "qk_nope_head_dim", None):  # MLA: transformers caches expanded keys
        heads, width = config.num_attention_heads, latent + config.qk_rope_head_dim
    row = 2 * config.num_hidden_layers * heads * width * tokens * model.dtype.itemsize
    return max(1, CACHE_BYTES // row)


def uniforms(seeds: Sequence[int], count: int) -> torch.Tensor:
    """[rows, count] numbers in [0, 1); row i depends on seeds[i] alone."""
    return torch.stack(
        [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    )


def pick(logits: torch.Tensor, uniform: torch.Tensor, decoding: Decoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulated distribution.

    Args:
        logits: [rows, vocabulary].
        uniform: [rows] numbers in [0, 1).

    Returns:
        tokens [rows] and their log-probabilities [rows].
    """
    logits = logits.float()
    if decoding.temperature > 0:
        logits = logits / decoding.temperature
    total = logits.logsumexp(-1, keepdim=True)
    if decoding.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        probabilities = (logits - total).exp_()
        if decoding.top_p < 1:
            probabilities = nucleus(probabilities, decoding.top_p)
        cumulated = probabilities.cumsum(-1, dtype=torch.float64)
        # Scaled by the sum as computed: a token of probability zero can never be drawn.
        target = uniform[:, None] * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return tokens, (logits.gather(-1, tokens[:, None]) - total).squeeze(-1)


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero the tail outside the smallest set of tokens whose probabilities add up to `top_p`."""
    ordered, indices = probabilities.sort(-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    return torch.zeros_like(probabilities).scatter_(-1, indices, ordered)


def _generate_chunk(model, rows: list[int], prompts, seeds, decoding: Decoding, answers: list[Answer]) -> None:
    """Rows share one cache. `rows` index into prompts, seeds and answers; equal prompts are neighbours."""
    unique: list[Sequence[int]] = []
    owner = []
    for row in rows:
        if not unique or unique[-1] != prompts[row]:
            unique.append(prompts[row])
        owner.append(len(unique) - 1)
    logits, cache, padding = _read(model, unique, decoding.pad)
    width = padding.shape[1]
    room = width + decoding.max_new_tokens
    alive = torch.tensor(rows)
    owner = torch.tensor(owner)
    cache.take(owner, room)
    logits, position = logits[owner], padding.logical_not().sum(-1)[owner]
    mask = torch.zeros(len(rows), 1, 1, room, dtype=model.dtype)
    mask[:, 0, 0, :width].masked_fill_(padding[owner], torch.finfo(model.dtype).min)
    uniform = uniforms([seeds[row] for row in rows], decoding.max_new_tokens)
    stop = torch.tensor(sorted(decoding.stop))
    ended = torch.zeros(len(rows), dtype=torch.bool)
    for step in range(decoding.max_new_tokens):
        tokens, log_probs = pick(logits, uniform[:, step], decoding)
        for row, done, token, log_prob in zip(
            alive.tolist(), ended.tolist(), tokens.tolist(), log_probs.tolist(), strict=True
        ):
            if not done:
                answers[row].tokens.append(token)
                answers[row].log_probs.append(log_prob)
        ended |= torch.isin(tokens, stop)
        if ended.all() or step + 1 == decoding.max_new_tokens:
            return
        if int(ended.sum()) * SHRINK >= len(alive):
            keep = (~ended).nonzero().squeeze(-1)
            cache.take(keep, room)
            alive, ended, tokens, position = alive[keep], ended[keep], tokens[keep], position[keep]
            mask, uniform = mask[keep], uniform[keep]
        seen = width + step + 1
        logits = model(
            input_ids=tokens[:, None],
            attention_mask=mask[:, :, :, :seen],
            position_ids=position[:, None],
            past_key_values=cache,
            use_cache=True,
            cache_position=torch.tensor([seen - 1]),
            logits_to_keep=1,
        ).logits[:, -1]
        position = position + 1


def _read(model, prompts: list[Sequence[int]], pad: int) -> tuple[torch.Tensor, RoomyCache, torch.Tensor]:
    """Run the prompts, padded on the left.

    Returns:
        logits [prompts, vocabulary] of the first answer token, the cache, and padding [prompts, width] (bool).
    """
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    padding = torch.tensor([[True] * (width - len(p)) + [False] * len(p) for p in prompts])
    forbidden = torch.ones(width, width, dtype=torch.bool).triu(1) | padding[:, None, :]
    # A padded position may look at itself: a row without any allowed key would be NaN.
    forbidden &= ~torch.eye(width, dtype=torch.bool)
    mask = torch.zeros(len(prompts), 1, width, width, dtype=model.dtype)
    mask.masked_fill_(forbidden[:, None], torch.finfo(model.dtype).min)
    cache = RoomyCache(model.config.num_hidden_layers)
    logits = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=(padding.logical_not().cumsum(-1) - 1).clamp_(min=0),
        past_key_values=cache,
        use_cache=True,
        cache_position=torch.arange(width),
        logits_to_keep=1,
    ).logits[:, -1]
    return logits, cache, padding
