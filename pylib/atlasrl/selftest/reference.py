"""What a correct training step must produce: one process, plain transformers, the DAPO loss written out here.

Nothing of verl or Megatron is used. The reference sees the same partition of the batch as the workers: per optimizer
step (mini batch), per worker, per micro batch, because verl averages the loss over the tokens of each micro batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Rules:
    """The numbers of loss and optimizer, as verl is given them."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    clip_dual: float = 10.0
    learning_rate: float = 1e-4
    weight_decay: float = 0.1
    decay_vectors: bool = True
    """Whether tensors with one dimension (norms, biases) are decayed: FSDP does, Megatron does not."""
    clip_grad: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass
class Step:
    """One optimizer step: gradients before clipping, parameters after it, by Hugging Face name."""

    loss: float
    grad_norm: float
    gradients: dict = field(repr=False)
    parameters: dict = field(repr=False)
    changes: dict = field(repr=False)
    """What the step added to each parameter."""


def dapo_loss(log_probs, old_log_probs, advantages, mask, rules: Rules):
    """Token mean of the decoupled-clip loss with a dual clip for negative advantages; all inputs [answers, tokens].

    DAPO, arXiv 2503.14476, equation 8; dual clip, arXiv 1912.09729.
    """
    import torch

    ratio = (log_probs - old_log_probs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - rules.clip_low, 1 + rules.clip_high) * advantages)
    gain = torch.where(advantages < 0, torch.maximum(gain, rules.clip_dual * advantages), gain)
    return -(gain * mask).sum() / mask.sum()


def train(
    model_folder: Path, batch: dict, steps: list[list[list[tuple[list[int], float]]]], rules: Rules
) -> list[Step]:
    """Take the given optimizer steps.

    Args:
        steps: per optimizer step, per worker, the micro batches as (rows of the batch, weight). The weights of a
            worker's micro batches add up to 1; workers weigh equally.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager").train()
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = [p for p in names.values() if p.ndim > 1 or rules.decay_vectors]
    plain = [p for p in names.values() if not (p.ndim > 1 or rules.decay_vectors)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": rules.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=rules.learning_rate,
        betas=rules.betas,
        eps=rules.eps,
    )
    taken = []
    for workers in steps:
        before = _state(model)
        optimizer.zero_grad()
        total = 0.0
        for micro_batches in workers:
            for rows, weight in micro_batches:
                part = {name: tensor[rows] for name, tensor in batch.items()}
                loss = _loss_of(model, part, rules) * weight / len(workers)
                loss.backward()
                total += loss.item()
        gradients = {n: (torch.zeros_like(p) if p.grad is None else p.grad.clone()) for n, p in names.items()}
        for parameter in names.values():
            # an expert that no token reached has gradient zero, not none: its weights still decay
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = torch.nn.utils.clip_grad_norm_(names.values(), rules.clip_grad)
        optimizer.step()
        after = _state(model)
        changes = {name: tensor - before[name] for name, tensor in after.items()}
        taken.append(Step(total, float(norm), gradients, after, changes))
    return taken


def _state(model) -> dict:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _loss_of(model, part: dict, rules: Rules):
    width = part["responses"].shape[1]
    logits = model(
        input_ids=part["input_ids"], attention_mask=part["attention_mask"].long(), position_ids=part["position_ids"]
    ).logits[:, -width - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, part["responses"][..., None])[..., 0]
    return dapo_loss(log_probs, part["old_log_probs"], part["advantages"], part["response_mask"].float(), rules)
