"""Runs in a process of its own, because it puts the CPU device layer in force: prints what it found as JSON.

python one_process.py MODEL_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2] / "pylib"))
os.environ["VERL_USE_EXTERNAL_MODULES"] = "atlasrl.trainer.cpu,atlasrl.trainer.cpu.megatron"


def main(folder: str) -> dict:
    import torch
    import torch.distributed as dist
    import verl  # noqa: F401  loads the plug-ins

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from mbridge import AutoBridge
    from megatron.core import parallel_state, tensor_parallel
    from transformers import AutoConfig

    from atlasrl.errors import Fault
    from atlasrl.precision import structure
    from atlasrl.trainer import alarms, patches

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = AutoConfig.from_pretrained(folder)
    bridge = AutoBridge.from_config(config, dtype=torch.float32)
    model = bridge.get_model(bf16=False, wrap_with_ddp=False)
    bridge.load_weights(model, folder)
    found: dict = {"outcomes": {f"{o.id} {o.target}": o.state for o in patches.outcomes()}}

    with torch.device("meta"):
        found["device of a module made on meta"] = torch.nn.Linear(2, 2).weight.device.type

    attention = next(m for m in model[0].modules() if type(m).__name__ == "MLASelfAttention")
    found["expected scale"] = structure.expected_scale(config.to_dict()).value
    found["measured scale"] = alarms.measured_scale(attention, torch.float32)
    found["measured scale in half precision"] = alarms.measured_scale(attention.bfloat16(), torch.bfloat16)
    attention.float()
    found["right scale"] = message_of(lambda: alarms.check_attention_scale(model, config), Fault)
    # MindSpeed before !2976: 1 / sqrt(kv_channels), whatever softmax_scale says
    attention.core_attention.softmax_scale = config.qk_rope_head_dim**-0.5
    found["scale of MindSpeed"] = message_of(lambda: alarms.check_attention_scale(model, config), Fault)

    plain, sharded = type("FP32Optimizer", (), {})(), type("DistributedOptimizer", (), {})()
    for name, optimizer, flag in (("agree", sharded, True), ("both plain", plain, False), ("differ", plain, True)):
        chunk = SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=flag))
        both = SimpleNamespace(chained_optimizers=[optimizer])
        found[f"flags {name}"] = message_of(lambda c=chunk, b=both: alarms.check_optimizer_flags([c], b), Fault)

    from transformers import AutoModelForCausalLM

    tokens = torch.arange(4, 28).reshape(2, 12)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    bridge = AutoBridge.from_config(config, dtype=torch.float32)
    model = bridge.get_model(bf16=False, wrap_with_ddp=False)
    bridge.load_weights(model, folder)
    with torch.no_grad():
        ours = model[0].eval()(tokens, torch.arange(12).expand(2, 12), None)
        found["logits off by"] = (ours - reference(tokens).logits).abs().max().item()
    return found


def message_of(action, kind) -> str:
    try:
        action()
    except kind as fault:
        return str(fault)
    return ""


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
