"""verl's rollout on a CPU: a plain Hugging Face copy of the policy inside each actor worker.

verl pushes the actor's weights into it whenever it changes to rollout mode. After every push each tensor is digested on
both sides, so that "the rollout has the actor's weights" is a fact of the run and not a belief.
"""

from __future__ import annotations

import hashlib
import os

import torch
from verl.workers.rollout.base import BaseRollout

from atlasrl.errors import Fault
from atlasrl.trainer.cpu.attention import ATTENTION
from atlasrl.trainer.cpu.generate import Decoding, generate

SMALL = 10_000_000
"""Parameters up to which a second thread costs more than it brings."""


class CpuRollout(BaseRollout):
    """Registered in verl as rollout engine `cpu` (patch `cpu-rollout`)."""

    def __init__(self, config, model_config, device_mesh):
        super().__init__(config, model_config, device_mesh)
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import no_init_weights
        from verl.utils.torch_dtypes import PrecisionType

        hf_config = self.model_config.hf_config
        with no_init_weights():  # every tensor comes from the actor, which `update_weights` checks
            self.model = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=PrecisionType.to_dtype(self.config.dtype),
                attn_implementation=ATTENTION,
                trust_remote_code=self.model_config.trust_remote_code,
            )
        self.model.eval().requires_grad_(False)
        if self.model.num_parameters() > SMALL:
            torch.set_num_threads(threads_per_worker())
        self.worker = f"worker {torch.distributed.get_rank()}"
        self.stop, self.pad = stop_tokens(self.model_config, hf_config)
        self.digests: dict[str, str] = {}

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    @torch.no_grad()
    async def update_weights(self, weights, **kwargs):
        """Copy the actor's weights and prove it.

        Raises:
            Fault: names that do not match, or a tensor that differs after the copy; names the tensor and the worker.
        """
        self.digests = copy_weights(self.model, weights, self.worker)

    async def generate(self, prompt_ids, sampling_params, request_id, image_data=None):
        """Answer a list of prompts.

        Args:
            prompt_ids: list of token lists.
            sampling_params: `seeds` (one per prompt), `temperature`, `top_p`.

        Returns:
            {"tokens": [...], "log_probs": [...], "digests": {tensor name: digest}}
        """
        decoding = Decoding(
            max_new_tokens=self.config.response_length,
            temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"],
            stop=self.stop,
            pad=self.pad,
        )
        answers = generate(self.model, prompt_ids, sampling_params["seeds"], decoding)
        return {
            "tokens": [answer.tokens for answer in answers],
            "log_probs": [answer.log_probs for answer in answers],
            "digests": self.digests,
        }


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights, worker: str) -> dict[str, str]:
    """Copy `(name, tensor)` pairs into `model`, then compare every tensor of the model with what was sent.

    Returns:
        Digest per tensor name.

    Raises:
        Fault: an unknown or missing name, or a tensor that differs (a later copy may have gone into the same memory).
    """
    targets = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    sent = {}
    for name, tensor in weights:
        if name not in targets:
            raise Fault(f"{worker}: the actor has a tensor {name} that the rollout's model lacks; are both one model?")
        target = targets[name]
        target.copy_(tensor)
        sent[name] = digest(tensor.to(target.dtype))
    places = {targets[name].data_ptr() for name in sent}
    persistent = model.state_dict(keep_vars=True)
    for name, target in persistent.items():
        if name not in sent and target.data_ptr() not in places:
            raise Fault(f"{worker}: the actor never sent {name}; the rollout would answer with untrained weights")
    for name, expected in sent.items():
        if digest(targets[name]) != expected:
            raise Fault(f"{worker}: tensor {name} of the rollout differs from the actor's after the weight sync")
    return sent


def digest(tensor: torch.Tensor) -> str:
    """Sixteen hex digits of a tensor's bytes."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data).hexdigest()[:16]


def stop_tokens(model_config, hf_config) -> tuple[frozenset[int], int]:
    """Token ids that end an answer (model config, generation config, tokenizer), and the padding id."""
    ends: set[int] = set()
    generation = getattr(model_config, "generation_config", None)
    for source in (hf_config, generation, model_config.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        ends |= set(ids) if isinstance(ids, (list, tuple)) else ({ids} if ids is not None else set())
    pad = model_config.tokenizer.pad_token_id
    return frozenset(ends), pad if pad is not None else min(ends, default=0)


def threads_per_worker() -> int:
    """Cores of this host divided by the workers on it; oversubscribed OpenMP threads cost more than tenfold."""
    import ray

    host = ray.util.get_node_ip_address()
    workers = sum(
        node["Resources"].get("NPU", 0) for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == host
    )
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(workers)))
