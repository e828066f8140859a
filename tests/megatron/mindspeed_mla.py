"""A verl plug-in for one test: latent attention is built by MindSpeed's code, from the checkout in MINDSPEED_CHECKOUT.

Only the file that MindSpeed's own MLA feature registers is loaded; the rest of MindSpeed wants torch_npu.
"""

import importlib.util
import os
from pathlib import Path

from atlasrl.trainer.patches import after_import


def _install(module) -> None:
    file = Path(os.environ["MINDSPEED_CHECKOUT"], "mindspeed/core/transformer/multi_head_latent_attention/adaptor.py")
    spec = importlib.util.spec_from_file_location("mindspeed_mla_adaptor", file)
    adaptor = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adaptor)
    module.MultiLatentAttention.__init__ = adaptor.multi_latent_attention_init_impl
    print("latent attention is MindSpeed's", flush=True)


after_import("megatron.core.transformer.multi_latent_attention", _install)
