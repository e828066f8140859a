"""verl's own agent loop over CPU rollouts: one request per answer. For comparison only; see `manager` for the default.

Chosen with `rollout.agent.agent_loop_manager_class=atlasrl.trainer.cpu.agent_loop.AgentLoopRollouts`.
"""

from __future__ import annotations

import asyncio
import zlib

import ray
from verl.experimental.agent_loop import AgentLoopManager
from verl.workers.rollout.replica import RolloutReplica, TokenOutput


class CpuServer:
    """Token-in, token-out server of one worker: requests that wait together are answered together."""

    def __init__(self, worker):
        self.worker, self.waiting, self.drain = worker, [], None

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None):
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), sampling_params, zlib.crc32(str(request_id).encode()), answer))
        if self.drain is None or self.drain.done():
            self.drain = asyncio.create_task(self._drain())
        tokens, log_probs = await answer
        return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="completed")

    async def _drain(self):
        while self.waiting:
            batch, self.waiting = self.waiting, []
            prompts, sampling, seeds, answers = zip(*batch, strict=True)
            try:
                reply = await self.worker.generate.remote(
                    prompt_ids=list(prompts),
                    sampling_params={
                        "temperature": sampling[0].get("temperature", 1.0),
                        "top_p": sampling[0].get("top_p", 1.0),
                        "seeds": list(seeds),
                    },
                    request_id="batch",
                )
                for answer, tokens, log_probs in zip(answers, reply["tokens"], reply["log_probs"], strict=True):
                    answer.set_result((tokens, log_probs))
            except Exception as problem:
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(problem)

    async def wake_up(self):
        await self.worker.wake_up.remote()

    async def sleep(self):
        await self.worker.sleep.remote()

    async def clear_kv_cache(self):
        pass


class CpuReplica(RolloutReplica):
    """One server per worker."""

    def get_ray_class_with_init_args(self):
        raise NotImplementedError("a CPU rollout lives in its actor worker")

    async def launch_servers(self):
        server = ray.remote(CpuServer).options(num_cpus=0, max_concurrency=4096).remote(self.workers[0])
        self.servers, self._server_handle, self._server_address = [server], server, f"worker {self.replica_rank}"


class AgentLoopRollouts(AgentLoopManager):
    def __init__(self, *arguments, **options):
        self.rollout_replica_class = CpuReplica  # verl's hook "for recipe to change"
        super().__init__(*arguments, **options)
