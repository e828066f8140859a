"""Training without an inference engine: answers replayed from a recorded run, or made up.

Debugging the training side needs no generation (the longest part of a step), and no engine that works: workers of such
a run build none, so that its memory and start-up time are saved too.
"""

from __future__ import annotations

import json
import time

import numpy as np
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.workers.rollout.base import BaseRollout

from atlasrl.errors import Fault
from atlasrl.precision.rollouts import Generation, Recording, Replay, tokens_digest, write
from atlasrl.recipe import Recipe, Stub
from atlasrl.rundir import RunDir
from atlasrl.trainer.cpu.manager import BatchRollouts
from atlasrl.trainer.records import prompt_tokens


class NoRollout(BaseRollout):
    """The worker's side of rollout engine `none`: there is nothing to wake up and nothing to update."""

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, **kwargs):
        pass


class Recorder:
    """Keeps the answers of each step on their way from the engine to the trainer."""

    def __init__(self, run: RunDir):
        self.folder, self.generations = run.rollouts, []

    def keep(self, ids: list[str], answers: DataProto) -> None:
        """Take in one generation, before it is scored."""
        self.generations.append(generation_of(ids, answers))

    def finish(self, step: int, weights: str | None, seconds: float) -> None:
        """Write what was kept as the recording of `step`.

        Raises:
            Fault: it cannot be written.
        """
        facts = {"weights": weights, "seconds": round(seconds, 3)}
        generations, self.generations = self.generations, []
        try:
            write(self.folder, Recording(step, generations, facts))
        except OSError as problem:
            raise Fault(
                f"the rollouts of step {step} cannot be recorded in {self.folder}: {problem.strerror}; free some space "
                "or set rollout.record: false"
            ) from problem


class ReplayedRollouts(BatchRollouts):
    """A rollout manager whose answers were recorded."""

    def __init__(self, config, tokenizer, recipe: Recipe):
        self.config, self.rollout, self.tokenizer = config, config.actor_rollout_ref.rollout, tokenizer
        self.replay = Replay(recipe.rollout.replay, recipe.steps)
        self.samples = recipe.rollout.samples
        self.weights: str | None = None
        print(f"replay: answers come from {self.replay.folder}; nothing is generated", flush=True)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The recorded answers to `prompts`. Raises Fault when it has none for exactly these."""
        began, info = time.perf_counter(), prompts.meta_info
        tokens = [tokens_digest(ids) for ids in self._tokens(prompts.non_tensor_batch["raw_prompt"][:: self.samples])]
        found = self.replay.generation(
            info["global_steps"], info["generation"], info["prompt_ids"], tokens, self.samples
        )
        self.weights = self.replay.recording.facts["weights"]
        answers = answers_of(found)
        answers.meta_info["timing"] = {"replay": time.perf_counter() - began}
        return answers


class StubRollouts(BatchRollouts):
    """A rollout manager that makes answers up: random tokens, lengths of a given distribution."""

    def __init__(self, config, tokenizer, stub: Stub):
        self.config, self.rollout, self.tokenizer = config, config.actor_rollout_ref.rollout, tokenizer
        self.stub, self.weights = stub, None
        special = {*tokenizer.all_special_ids, tokenizer.pad_token_id}
        self.vocabulary = np.array([token for token in range(len(tokenizer)) if token not in special])
        print(f"stub: answers and rewards are made up ({stub}); this run learns nothing", flush=True)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        answers = super().generate_sequences(prompts)
        answers.batch.pop("rollout_log_probs", None)  # nobody knows the probability of a made-up token
        return answers

    def _sync(self) -> bool:
        return False

    def _ask(self, ids, seeds, sampling) -> list[dict]:
        tokens = [self._answer(np.random.default_rng(seed)) for seed in seeds]
        return [{"tokens": tokens, "log_probs": [[0.0] * len(answer) for answer in tokens], "digests": {}}]

    def _answer(self, random: np.random.Generator) -> list[int]:
        limit = self.rollout.response_length
        length = min(limit, max(1, round(self.stub.median_tokens * np.exp(random.normal(0, self.stub.spread)))))
        answer = random.choice(self.vocabulary, length).tolist()
        if length < limit:
            answer[-1] = self.tokenizer.eos_token_id
        return answer


class StubScorer:
    """Rewards for made-up answers: every group has right and wrong ones, so that each step has a gradient."""

    def __call__(self, batch: DataProto, return_dict: bool = False):
        mask = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :]
        right = torch.arange(len(mask)) % 2 == 0
        rewards = torch.zeros(mask.shape)
        rewards[torch.arange(len(mask)), mask.sum(1) - 1] = torch.where(right, 1.0, -1.0)
        extras = {"acc": right.float().tolist()}
        return {"reward_tensor": rewards, "reward_extra_info": extras} if return_dict else rewards


class NoEngine:
    """Stands where verl would build its rollout manager; `instead_of` puts another one in its place."""

    def __init__(self, config, worker_group=None, rm_resource_pool=None):
        pass


def instead_of(manager, recipe: Recipe, config, tokenizer):
    """The rollout manager of a run without an engine; `manager` itself for every other run."""
    if recipe.rollout.replay is not None:
        return ReplayedRollouts(config, tokenizer, recipe)
    if recipe.rollout.stub is not None:
        return StubRollouts(config, tokenizer, recipe.rollout.stub)
    return manager


def generation_of(ids: list[str], answers: DataProto) -> Generation:
    """A batch of answers as plain tensors and JSON.

    Raises:
        Fault: a column that JSON does not hold.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in answers.batch.items()}
    tokens = prompt_tokens(answers, len(ids))
    return Generation(ids, tokens, tensors, {n: _plain(n, column) for n, column in answers.non_tensor_batch.items()})


def answers_of(generation: Generation) -> DataProto:
    """The batch that `generation_of` was given."""
    rows = len(next(iter(generation.tensors.values())))
    columns = {
        name: np.array([*values, None], dtype=object)[:-1] if dtype == "object" else np.array(values, dtype=dtype)
        for name, (dtype, values) in generation.columns.items()
    }
    return DataProto(TensorDict(dict(generation.tensors), batch_size=rows), columns, {})


def _plain(name: str, column: np.ndarray) -> list:
    values = [str(column.dtype), column.tolist()]
    try:
        json.dumps(values)
    except TypeError as problem:
        raise Fault(f"column {name!r} of the answers cannot be recorded: {problem}; only JSON values can") from None
    return values
