"""Megatron on a CPU, part 2: DeepSeek-V3 through mbridge without Transformer Engine.

mbridge builds its models from Transformer Engine layers. megatron-core has the same layers in plain torch (the "local"
specification); they carry other parameter names (a norm of its own instead of one fused into the next projection, one
module per expert instead of a grouped one), so only the layer specification and the name mapping are replaced. The
configuration, loading, splitting, merging and export stay mbridge's.
"""

from __future__ import annotations

import torch

from atlasrl.errors import Fault
from atlasrl.trainer import megatron_patches  # noqa: F401  they mend the class that the one below derives from
from atlasrl.trainer.patches import patch

PATCHES = ("cpu-mbridge",)
FORCED = {
    "moe_grouped_gemm": "grouped GEMM is a CUDA kernel",
    "moe_shared_expert_overlap": "overlap needs a second stream",
    "persist_layer_norm": "Apex kernel",
    "bias_activation_fusion": "compiled for CUDA",
    "bias_dropout_fusion": "compiled for CUDA",
    "masked_softmax_fusion": "CUDA kernel",
    "apply_rope_fusion": "Transformer Engine kernel",
    "gradient_accumulation_fusion": "Apex kernel",
    "moe_permute_fusion": "Transformer Engine kernel",
    "moe_enable_deepep": "needs NVLink or RDMA",
    "use_flash_attn": "MindSpeed and CUDA kernels",
}
"""Transformer settings that are off on a CPU whatever the recipe says, with the reason."""


def forced_off(settings: dict) -> dict[str, str]:
    """Those of `settings` (override_transformer_config) that a CPU does not honour: name -> reason."""
    return {name: reason for name, reason in FORCED.items() if settings.get(name)}


@patch(
    id="cpu-mbridge",
    reason="mbridge builds DeepSeek-V3 from Transformer Engine layers only; a CPU has megatron-core's torch layers",
    upstream="mbridge/models/deepseek_v3.py and core/llm_bridge.py, 0.13.1 (use_transformer_engine=True)",
    package="mbridge",
    versions=">=0.13.1,<0.14",
    target="mbridge.models.deepseek_v3:DeepseekV3Bridge",
    expects="get_gpt_layer_with_transformer_engine_spec",
)
def without_transformer_engine(original):
    from mbridge.core import register_model
    from mbridge.core.safetensor_io import SafeTensorIO
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.enums import AttnBackend

    attention_class = _mla_attention_class()

    class CpuDeepseekV3Bridge(original):
        _ATTENTION_MAPPING = {  # noqa: RUF012  mbridge's own tables are class attributes
            **original._ATTENTION_MAPPING,
            "self_attention.q_layernorm.weight": ["model.layers.{layer_number}.self_attn.q_a_layernorm.weight"],
            "self_attention.kv_layernorm.weight": ["model.layers.{layer_number}.self_attn.kv_a_layernorm.weight"],
        }

        def _build_config(self):
            if getattr(self.hf_config, "num_nextn_predict_layers", 0):
                raise Fault(
                    "config.json has num_nextn_predict_layers > 0, but the multi-token-prediction layer is not trained "
                    "and mbridge 0.13.1 converts it only at 61 layers; set num_nextn_predict_layers to 0 and leave "
                    "its weights out of the index"
                )
            known = self.TransformerConfigClass.__dataclass_fields__
            for name in forced_off(self.extra_args):
                self.extra_args.pop(name)
            self.extra_args.update({name: False for name in FORCED if name in known})
            self.extra_args.update(use_cpu_initialization=True, attention_backend=AttnBackend.local)
            config = super()._build_config()
            config.mtp_num_layers = None
            return config

        def _get_transformer_layer_spec(self, vp_stage=None):
            self.has_vp_stage = False
            block = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False)
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = attention_class
            return block

        def _get_safetensor_io(self, weights_path):
            return SafeTensorIO(self._get_actual_hf_path(weights_path))

        def _weight_name_mapping_mcore_local_to_global(self, model, consider_ep=True):
            """Give the experts mbridge's grouped names: `experts.local_experts.3.linear_fc1.weight` on expert rank r
            becomes `experts.linear_fc1.weight<3 + r * experts per rank>`."""
            names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
            per_rank = (self.config.num_moe_experts or 0) // self.mpu.ep_size
            first = per_rank * self.mpu.ep_rank if consider_ep else 0
            return dict(_grouped(local, name, first) for local, name in names.items())

    return register_model("deepseek_v3")(CpuDeepseekV3Bridge)


class _ExpertName(str):
    """The local name of an expert weight, which mbridge must take for one.

    `load_weights` splits a weight over the expert-tensor ranks, instead of the tensor ranks, when
    ".mlp.experts.linear_fc" is in its LOCAL name; the torch experts are called `local_experts.<i>.linear_fc1`.
    """

    __slots__ = ()

    def __contains__(self, part):
        return part == ".mlp.experts.linear_fc" or super().__contains__(part)


def _grouped(local: str, name: str, first_expert: int) -> tuple[str, str]:
    before, found, rest = name.partition(".local_experts.")
    if not found:
        return local, name
    index, _, weight = rest.partition(".")
    return _ExpertName(local), f"{before}.{weight}{int(index) + first_expert}"


def _mla_attention_class():
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class CausalMLAttention(DotProductAttention):
        """megatron-core's torch attention for heads whose values are narrower than their keys.

        verl hands over batches that are padded on the right, so causal masking alone is exact for every real token.
        """

        def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
            super().__init__(*args, **kwargs)
            if v_channels:
                self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

        def forward(self, query, key, value, attention_mask, *args, **kwargs):
            """query, key: [s, b, heads, qk_dim], value: [s, b, heads, v_dim] -> [s, b, heads * v_dim]."""
            length = query.shape[0]
            future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            return super().forward(query, key, value, future, *args, **kwargs)

    return CausalMLAttention
