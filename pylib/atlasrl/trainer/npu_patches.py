"""Faults of vLLM-Ascend's rollout with latent attention, mended. Importing this module applies nothing."""

from __future__ import annotations

from atlasrl.trainer.patches import patch

PATCHES = ("weights-after-sync", "plain-rotary")


@patch(
    id="weights-after-sync",
    reason="vllm-ascend makes W_UV and W_UK_T of latent attention from kv_b_proj once, after loading; a weight sync "
    "replaces kv_b_proj alone, so the answers are those of step 0's attention, or gibberish with load_format dummy",
    upstream="verl PR #4130, lost with PR #4411, back in 0.7.1 (workers/rollout/vllm_rollout/utils.py)",
    package="verl",
    versions=">=0.7.0,<0.7.1",
    target="verl.workers.rollout.vllm_rollout.vllm_rollout:vLLMAsyncRollout.update_weights",
    expects="model.load_weights(weights)",
)
def process_weights_after_sync(original):
    async def update_weights(self, weights, **kwargs):
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        await original(self, weights, **kwargs)
        runner = self.inference_engine.worker.model_runner
        device = next(runner.model.parameters()).device
        process_weights_after_loading(runner.model, runner.vllm_config.model_config, device)

    return update_weights


@patch(
    id="plain-rotary",
    reason="vllm-ascend reads cos_cached, which only the yarn rotary embedding has: AttributeError at the first prompt "
    "of Moonlight",
    upstream="vllm-ascend 0.11.0rc1 and 0.11.0, attention/mla_v1.py",
    package="vllm-ascend",
    versions=">=0.11.0rc1,<0.12",
    target="vllm_ascend.attention.mla_v1:AscendMLAMetadataBuilder.build",
    expects="self_attn.rotary_emb.cos_cached",
)
def tables_of_a_plain_rotary_embedding(original):
    import torch

    def build(self, common_prefix_len, common_attn_metadata, model):
        rotary = model.model.layers[model.model.start_layer].self_attn.rotary_emb
        if self.cos_cache is None and not hasattr(rotary, "cos_cached"):
            cos, sin = rotary.cos_sin_cache.chunk(2, dim=-1)  # [positions, rotary width / 2] each
            self.cos_cache, self.sin_cache = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return original(self, common_prefix_len, common_attn_metadata, model)

    return build
