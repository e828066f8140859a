"""Fault: attention scaled by the head size of the rotary part alone, as a fused kernel once did."""

from atlasrl.trainer import patches


@patches.patch(
    id="planted-scale",
    reason="a test plants it",
    upstream="none",
    package="transformers",
    versions=">=4",
    target="transformers.models.deepseek_v3.modeling_deepseek_v3:DeepseekV3Attention.__init__",
    expects="self.scaling",
)
def plant(original):
    def __init__(self, config, layer_idx):
        original(self, config, layer_idx)
        self.scaling = config.qk_rope_head_dim**-0.5

    return __init__


patches.apply("planted-scale")
