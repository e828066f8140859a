"""Planted fault: the rollout keeps the weights of its first sync (verl loads this by `external_lib`)."""

from atlasrl.trainer.cpu.rollout import CpuRollout

original = CpuRollout.update_weights


async def only_once(self, weights, **kwargs):
    if not self.digests:
        return await original(self, weights, **kwargs)
    for _ in weights:  # taking part in the gathering of shards
        pass


CpuRollout.update_weights = only_once
