"""Fault: one tensor keeps its old value in the rollout after every weight sync but the first."""

from atlasrl.trainer import patches

NAME = "model.layers.1.self_attn.o_proj.weight"


@patches.patch(
    id="planted-skip",
    reason="a test plants it",
    upstream="none",
    package="verl",
    versions=">=0.7",
    target="atlasrl.trainer.cpu.rollout:CpuRollout.update_weights",
    expects="copy_weights",
)
def plant(original):
    async def update_weights(self, weights, **kwargs):
        old = self.model.get_parameter(NAME).clone()
        first = not self.digests
        await original(self, weights, **kwargs)
        if not first:
            self.model.get_parameter(NAME).data.copy_(old)

    return update_weights


patches.apply("planted-skip")
