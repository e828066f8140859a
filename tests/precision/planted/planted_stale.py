"""Fault: the rollout keeps W_UV, a contiguous copy of a part of kv_b_proj that no later sync updates."""

from atlasrl.trainer import patches


@patches.patch(
    id="planted-stale",
    reason="a test plants it",
    upstream="none",
    package="verl",
    versions=">=0.7",
    target="atlasrl.trainer.cpu.rollout:CpuRollout.update_weights",
    expects="copy_weights",
)
def plant(original):
    async def update_weights(self, weights, **kwargs):
        await original(self, weights, **kwargs)
        for layer in self.model.model.layers:
            attention = layer.self_attn
            if not hasattr(attention, "W_UV"):
                heads = attention.kv_b_proj.weight.view(attention.num_heads, -1, attention.kv_lora_rank)
                attention.W_UV = heads[:, attention.qk_nope_head_dim :].contiguous()

    return update_weights


patches.apply("planted-stale")
