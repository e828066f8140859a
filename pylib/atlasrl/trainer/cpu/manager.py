"""Whole-batch rollouts: verl's AgentLoopManager without its agents.

verl's agent loop runs one asyncio task, one hydra.instantiate and several actor calls per answer, about 20 ms of CPU
each. This manager is plugged in through the same setting (`rollout.agent.agent_loop_manager_class`), returns the same
DataProto and talks to the actor workers directly.
"""

from __future__ import annotations

import hashlib
import time

import numpy as np
import ray
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.utils import hf_tokenizer
from verl.utils.model import compute_position_id_with_mask

from atlasrl.errors import Fault


class BatchRollouts:
    def __init__(self, config, worker_group=None, rm_resource_pool=None):
        self.config, self.rollout = config, config.actor_rollout_ref.rollout
        self.workers = worker_group.workers
        self.tokenizer = hf_tokenizer(
            config.actor_rollout_ref.model.path, trust_remote_code=config.data.trust_remote_code
        )
        self.weights: str | None = None
        """Digest of the weights that gave the last answers."""
        self._current = False

    def weights_changed(self) -> None:
        """The actor was updated or loaded: synchronise before the next answers."""
        self._current = False

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answer every row of `prompts` (column `raw_prompt`), in order.

        Raises:
            Fault: a prompt too long, or workers whose weights differ after the synchronisation.
        """
        began = time.perf_counter()
        synced = self._sync()
        generating = time.perf_counter()
        ids = self._tokens(prompts.non_tensor_batch["raw_prompt"])
        replies = self._ask(ids, _seeds(prompts, int(self.config.data.seed)), self._sampling(prompts))
        self.weights = agree([reply["digests"] for reply in replies])
        tokens = [answer for reply in replies for answer in reply["tokens"]]
        log_probs = [answer for reply in replies for answer in reply["log_probs"]]
        answers = self._pack(ids, tokens, log_probs)
        answers.meta_info["timing"] = {
            "weight_sync": generating - began if synced else 0.0,
            "generate": time.perf_counter() - generating,
        }
        return answers

    def _sync(self) -> bool:
        """Bring the actor's weights into the rollout unless they are there. Returns whether it was needed."""
        if self._current:
            return False
        ray.get([worker.wake_up.remote() for worker in self.workers])
        ray.get([worker.sleep.remote() for worker in self.workers])
        self._current = True
        return True

    def _sampling(self, prompts: DataProto) -> dict[str, float]:
        source = self.rollout.val_kwargs if prompts.meta_info.get("validate") else self.rollout
        greedy = prompts.meta_info.get("validate") and not source.do_sample
        return {"temperature": 0.0 if greedy else float(source.temperature), "top_p": float(source.top_p)}

    def _tokens(self, chats: np.ndarray) -> list[list[int]]:
        """Token ids of each prompt; rows of one group share the chat object and are read once."""
        known: dict[int, list[int]] = {}
        options = dict(self.config.data.get("apply_chat_template_kwargs") or {})
        for chat in chats:
            if id(chat) not in known:
                known[id(chat)] = list(
                    self.tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, tokenize=True, **options)
                )
        longest = max(map(len, known.values()))
        if longest > self.rollout.prompt_length:
            raise Fault(f"a prompt has {longest} tokens, data.max_prompt_tokens is {self.rollout.prompt_length}")
        return [known[id(chat)] for chat in chats]

    def _ask(self, ids: list[list[int]], seeds: list[int], sampling: dict[str, float]) -> list[dict]:
        """Split the rows evenly; every worker answers, also one without rows, so that its weights are compared."""
        bounds = np.linspace(0, len(ids), len(self.workers) + 1).astype(int)
        return ray.get(
            [
                worker.generate.remote(
                    prompt_ids=ids[low:high],
                    sampling_params={**sampling, "seeds": seeds[low:high]},
                    request_id="batch",
                )
                for worker, low, high in zip(self.workers, bounds[:-1], bounds[1:], strict=True)
            ]
        )

    def _pack(self, ids: list[list[int]], tokens: list[list[int]], log_probs: list[list[float]]) -> DataProto:
        """Prompts padded on the left, answers on the right, as verl's agent loop returns them."""
        rows, width, room, pad = (
            len(ids),
            self.rollout.prompt_length,
            self.rollout.response_length,
            self.tokenizer.pad_token_id,
        )
        prompts = torch.full((rows, width), pad)
        answers = torch.full((rows, room), pad)
        prompt_mask = torch.zeros((rows, width), dtype=torch.long)
        answer_mask = torch.zeros((rows, room), dtype=torch.long)
        scores = torch.zeros((rows, room))
        for row, (prompt, answer, log_prob) in enumerate(zip(ids, tokens, log_probs, strict=True)):
            prompts[row, width - len(prompt) :] = torch.tensor(prompt)
            prompt_mask[row, width - len(prompt) :] = 1
            answers[row, : len(answer)] = torch.tensor(answer)
            answer_mask[row, : len(answer)] = 1
            scores[row, : len(answer)] = torch.tensor(log_prob)
        mask = torch.cat([prompt_mask, answer_mask], 1)
        tensors = {
            "prompts": prompts,
            "responses": answers,
            "response_mask": answer_mask,
            "input_ids": torch.cat([prompts, answers], 1),
            "attention_mask": mask,
            "position_ids": compute_position_id_with_mask(mask),
        }
        if self.rollout.calculate_log_probs:
            tensors["rollout_log_probs"] = scores
        return DataProto(
            batch=TensorDict(tensors, batch_size=rows),
            non_tensor_batch={"__num_turns__": np.full(rows, 2, np.int32)},
            meta_info={},
        )


def agree(tables: list[dict[str, str]]) -> str:
    """One digest of the weights that all workers hold.

    Raises:
        Fault: workers differ; names the tensor and the worker.
    """
    first = tables[0]
    for worker, table in enumerate(tables[1:], 1):
        for name in sorted(first.keys() | table.keys()):
            if first.get(name) != table.get(name):
                raise Fault(
                    f"after the weight sync tensor {name} of worker {worker} differs from that of worker 0: replicas "
                    "have diverged; compare gradients with bin/selftest"
                )
    return hashlib.sha256(repr(sorted(first.items())).encode()).hexdigest()[:16]


def _seeds(prompts: DataProto, seed: int) -> list[int]:
    """One seed per row from the run's seed, the step, the generation and the row; independent of the workers."""
    info = prompts.meta_info
    phase = "validate" if info.get("validate") else info.get("generation", 1)
    key = f"{seed}/{info.get('global_steps', 0)}/{phase}"
    return [
        int.from_bytes(hashlib.sha256(f"{key}/{row}".encode()).digest()[:8], "big") >> 1 for row in range(len(prompts))
    ]
