"""The rollout engine of a recipe alone: does it answer sensibly, how fast, and how sure is it?

No trainer, no verl, no weight sync: what is wrong here is the engine's or the checkpoint's. Answers are drawn with the
recipe's sampling settings; every prompt has its own seed on the CPU engine, so that its answers are reproducible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atlasrl.errors import Fault
from atlasrl.recipe import Recipe, Rollout
from atlasrl.trainer import overrides


@dataclass(frozen=True)
class Sample:
    """One answer."""

    prompt: str
    answer: str
    tokens: list[int]
    log_probs: list[float]
    """of each token at the recipe's temperature"""

    @property
    def mean_log_prob(self) -> float:
        return sum(self.log_probs) / len(self.log_probs) if self.log_probs else float("nan")


@dataclass(frozen=True)
class Session:
    """The answers of all engines and what they cost."""

    samples: list[Sample]
    load_seconds: float
    seconds: float
    replicas: int

    @property
    def tokens_per_second(self) -> float:
        return sum(len(sample.tokens) for sample in self.samples) / self.seconds


def vllm_arguments(recipe: Recipe, model: str) -> dict:
    """Arguments of `vllm.LLM` that give the engine verl builds for this recipe. One engine a data rank."""
    rollout, data = recipe.rollout, recipe.data
    return {
        "model": model,
        "dtype": recipe.model.compute_dtype,
        "tensor_parallel_size": rollout.tensor,
        "enable_expert_parallel": rollout.expert > 1,
        "distributed_executor_backend": "mp" if rollout.tensor > 1 else None,
        "gpu_memory_utilization": rollout.memory_fraction,
        "max_model_len": data.max_prompt_tokens + data.max_response_tokens,
        "trust_remote_code": recipe.model.trust_remote_code,
        "load_format": "auto",
        "seed": 0,
        **(_npu_arguments(rollout) if recipe.device == "npu" else {}),
    }


def _npu_arguments(rollout: Rollout) -> dict:
    """What verl is told of vllm-ascend, as the engine itself takes it."""
    from omegaconf import OmegaConf

    told = OmegaConf.create()
    for setting in overrides.npu_engine(rollout):
        key = setting.key.lstrip("+").removeprefix(f"{overrides.ROLLOUT}.").removeprefix("engine_kwargs.vllm.")
        OmegaConf.update(told, key, setting.value)
    return OmegaConf.to_container(told)


def data_ranks(recipe: Recipe) -> int:
    """Engines that share one model's experts: expert = tensor × data ranks."""
    return max(1, recipe.rollout.expert // recipe.rollout.tensor)


def ask(recipe: Recipe, model: Path, prompts: list[list[dict] | str], replicas: int) -> Session:
    """Answer prompts on the connected Ray cluster.

    Args:
        prompts: chats, or texts (each becomes one user message).
        replicas: engines side by side on the CPU; vLLM has as many as the recipe's expert split needs.

    Raises:
        Fault: an engine cannot be built or does not answer.
    """
    import ray

    if not any(Path(model).glob("*.safetensors")):
        raise Fault(f"{model} holds no safetensors; give a BF16 or float32 checkpoint, for example RUN/model")
    chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    began = time.perf_counter()
    if recipe.rollout.engine == "cpu":
        actors = [ray.remote(CpuEngine).options(num_cpus=0).remote(recipe, str(model)) for _ in range(replicas)]
    else:
        actors = list(_vllm_engines(recipe, str(model)))
    try:
        ray.get([actor.ready.remote() for actor in actors])
        ready = time.perf_counter()
        bounds = [len(chats) * number // len(actors) for number in range(len(actors) + 1)]
        parts = ray.get(
            [
                actor.answer.remote(chats[low:high], low)
                for actor, low, high in zip(actors, bounds[:-1], bounds[1:], strict=True)
            ]
        )
    except ray.exceptions.RayError as problem:
        cause = getattr(problem, "cause", None) or problem
        raise Fault(f"the {recipe.rollout.engine} engine failed: {' '.join(str(cause).split())[-300:]}") from problem
    samples = [Sample(**sample) for part in parts for sample in part]
    return Session(samples, ready - began, time.perf_counter() - ready, len(actors))


class CpuEngine:
    """The CPU rollout's generation with a checkpoint from disk."""

    def __init__(self, recipe: Recipe, model: str):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from atlasrl.trainer.cpu.attention import ATTENTION

        self.recipe = recipe
        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=recipe.model.trust_remote_code)
        self.model = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=getattr(torch, recipe.model.compute_dtype),
            attn_implementation=ATTENTION,
            trust_remote_code=recipe.model.trust_remote_code,
        ).eval()

    def ready(self) -> bool:
        return True

    def answer(self, chats: list[list[dict]], first: int) -> list[dict]:
        """One answer per chat; `first` is the number of the first one, which seeds it."""
        from atlasrl.trainer.cpu.generate import Decoding, generate

        ids = [
            list(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)) for chat in chats
        ]
        pad, stop = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        rollout = self.recipe.rollout
        decoding = Decoding(
            max_new_tokens=self.recipe.data.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            stop=frozenset({stop}),
            pad=stop if pad is None else pad,
        )
        seeds = [(self.recipe.seed << 20) + first + row for row in range(len(ids))]
        answers = generate(self.model, ids, seeds, decoding) if ids else []
        return [
            _sample(self.tokenizer, prompt, answer.tokens, answer.log_probs)
            for prompt, answer in zip(ids, answers, strict=True)
        ]


class VllmEngine:
    """One data rank of vLLM with the recipe's tensor and expert split."""

    def __init__(self, recipe: Recipe, model: str, environment: dict[str, str]):
        os.environ.update(environment)
        from vllm import LLM, SamplingParams

        self.engine = LLM(**vllm_arguments(recipe, model))
        self.tokenizer = self.engine.get_tokenizer()
        self.sampling = SamplingParams(
            temperature=recipe.rollout.temperature,
            top_p=recipe.rollout.top_p,
            max_tokens=recipe.data.max_response_tokens,
            logprobs=0,
            seed=recipe.seed,
        )

    def ready(self) -> bool:
        return True

    def answer(self, chats: list[list[dict]], first: int) -> list[dict]:
        """One answer per chat."""
        ids = [
            list(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)) for chat in chats
        ]
        outputs = self.engine.generate([{"prompt_token_ids": prompt} for prompt in ids], self.sampling)
        found = []
        for prompt, output in zip(ids, (output.outputs[0] for output in outputs), strict=True):
            tokens = list(output.token_ids)
            scores = [place[token].logprob for place, token in zip(output.logprobs, tokens, strict=True)]
            found.append(_sample(self.tokenizer, prompt, tokens, scores))
        return found


def _vllm_engines(recipe: Recipe, model: str) -> Iterator:
    """An actor per data rank, each with its tensor ranks' devices; vLLM's own variables join them."""
    import ray

    ranks, resource = data_ranks(recipe), {"npu": "NPU", "cuda": "GPU"}[recipe.device]
    address = ray.util.get_node_ip_address()
    for rank in range(ranks):
        environment = {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": "0",
            "VLLM_DP_SIZE": str(ranks),
            "VLLM_DP_MASTER_IP": address,
            "VLLM_DP_MASTER_PORT": "29577",
        }
        count = recipe.rollout.tensor
        needs = {"num_gpus": count} if resource == "GPU" else {"resources": {resource: count}}
        yield (
            ray.remote(VllmEngine).options(num_cpus=0, **needs).remote(recipe, model, environment if ranks > 1 else {})
        )


def _sample(tokenizer, prompt: list[int], tokens: list[int], log_probs: list[float]) -> dict:
    return {
        "prompt": tokenizer.decode(prompt),
        "answer": tokenizer.decode(tokens),
        "tokens": list(map(int, tokens)),
        "log_probs": list(map(float, log_probs)),
    }


def prompts_of(file: Path, count: int) -> list[list[dict]]:
    """The first `count` chats of a parquet file in verl's schema."""
    import pyarrow.parquet

    if not file.is_file():
        raise Fault(f"{file}: no such file; give --prompt TEXT instead")
    batch = next(pyarrow.parquet.ParquetFile(file).iter_batches(count, columns=["prompt"]))
    return batch["prompt"].to_pylist()


def lines(session: Session, log_probs: bool = False) -> Iterator[str]:
    """The session for a person."""
    for number, sample in enumerate(session.samples, 1):
        yield f"[{number}] {sample.prompt}"
        yield f"    -> {sample.answer!r}  {len(sample.tokens)} tokens, mean log p {sample.mean_log_prob:.3f}"
        if log_probs:
            yield "    " + " ".join(
                f"{token}:{value:.3f}" for token, value in zip(sample.tokens, sample.log_probs, strict=True)
            )
    total = sum(len(sample.tokens) for sample in session.samples)
    yield (
        f"{len(session.samples)} answers, {total} tokens in {session.seconds:.1f} s = {session.tokens_per_second:.1f} "
        f"tokens/s on {session.replicas} engine(s); loading took {session.load_seconds:.1f} s"
    )
