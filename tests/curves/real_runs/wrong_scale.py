"""Planted fault: the actor's attention is scaled by the size of the value heads (verl loads this by `external_lib`).

Heads of keys are 32 wide here and those of values 16, so that the softmax scale is 1.41 times what it should be; with
DeepSeek-V3's 192 and 128 it would be 1.22 times. The rollout's scale stays right.
"""

from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

original = MultiLatentAttention.__init__


def with_the_wrong_head_size(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.core_attention.softmax_scale = self.softmax_scale = self.config.v_head_dim**-0.5


MultiLatentAttention.__init__ = with_the_wrong_head_size
