"""The recorded batch of the self-test: answers, old log-probabilities and advantages, in verl's layout.

Answers are sampled from the model itself. The old log-probabilities are the model's own plus an offset from a short
list, so that every branch of the DAPO loss is taken (inside the clip range, above it, below it, beyond the dual clip)
and no probability ratio lies near a branch point, where rounding alone could choose the other branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OFFSETS = (0.0, 0.0, 0.1, -0.1, 0.5, -0.5, -2.8)
"""new minus old log-probability: ratios 1, 1, 1.11, 0.90 (kept), 1.65, 0.61 (clipped), 0.06; -2.8 is used as +2.8 (a
ratio of 16.4, beyond the dual clip at 10) for answers with a negative advantage."""
PROMPT, ANSWER = 8, 12
"""Tokens of the padded prompt and answer."""
FIRST_TOKEN = 4
"""Lower ids are special. transformers gives the padding token no gradient even where it is a real input."""


@dataclass(frozen=True)
class BatchShape:
    prompts: int = 8
    samples: int = 4

    @property
    def answers(self) -> int:
        return self.prompts * self.samples


def record(model_folder: Path, shape: BatchShape, seed: int = 1) -> dict:
    """Sample a batch; tensors by verl's names, each with `shape.answers` rows.

    prompts [n, 8], responses [n, 12], input_ids, attention_mask, position_ids [n, 20] (prompts padded on the left,
    answers on the right), response_mask, old_log_probs, advantages [n, 12].
    """
    import torch
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager").eval()
    vocabulary, pad = model.config.vocab_size, model.config.pad_token_id or 0
    draw = lambda low, high, size: torch.randint(low, high, size, generator=generator)  # noqa: E731

    prompts = torch.full((shape.answers, PROMPT), pad)
    for row in range(0, shape.answers, shape.samples):
        length = int(draw(3, PROMPT + 1, (1,)))
        prompts[row : row + shape.samples, PROMPT - length :] = draw(FIRST_TOKEN, vocabulary, (length,))
    prompt_mask = (prompts != pad).long()
    lengths = draw(2, ANSWER + 1, (shape.answers,))
    response_mask = (torch.arange(ANSWER)[None] < lengths[:, None]).long()

    ids, mask = prompts, prompt_mask
    with torch.no_grad():
        for step in range(ANSWER):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
            logits[:, :FIRST_TOKEN] = float("-inf")
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            token = torch.where(response_mask[:, step : step + 1] > 0, token, pad)
            ids = torch.cat([ids, token], -1)
            mask = torch.cat([mask, response_mask[:, step : step + 1]], -1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        responses = ids[:, PROMPT:]
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        log_probs = logits[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, responses[..., None])[..., 0]

    advantages = torch.randn(shape.answers, generator=generator)
    advantages = advantages[:, None] * response_mask
    offsets = torch.tensor(OFFSETS)[draw(0, len(OFFSETS), (shape.answers, ANSWER))]
    offsets = torch.where((offsets == OFFSETS[-1]) & (advantages < 0), -offsets, offsets)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "response_mask": response_mask,
        "old_log_probs": (log_probs - offsets) * response_mask,
        "advantages": advantages,
    }


def save(batch: dict, file: Path) -> None:
    """Write a batch as safetensors, to be replayed with `bin/selftest --batch FILE`."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in batch.items()}, file)


def load(file: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(file)
