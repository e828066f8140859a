"""Faults of verl 0.7 and its libraries that matter on every device. Importing this module applies nothing."""

from __future__ import annotations

import json
import os

from atlasrl.trainer.patches import patch

PATCHES = (
    "tensorboard-purge",
    "tensorboard-flush",
    "file-logger",
    "no-rollout",
    "fsdp2-idle-experts",
)
VERL = ">=0.7.0,<0.8"

FIRST_STEP = "ATLASRL_FIRST_STEP"
"""Environment variable of the trainer process: the first step this attempt will log."""


@patch(
    id="tensorboard-purge",
    reason="after a resume the steps since the last checkpoint would be in the curve twice",
    upstream="verl/utils/tracking.py, 0.7.0; tensorboard #3732",
    package="verl",
    versions=VERL,
    target="verl.utils.tracking:_TensorboardAdapter.__init__",
    expects="SummaryWriter(tensorboard_dir)",
)
def purge_steps_that_run_again(original):
    def __init__(self, project_name, experiment_name):
        from torch.utils.tensorboard import SummaryWriter

        folder = os.environ.get("TENSORBOARD_DIR", f"tensorboard_log/{project_name}/{experiment_name}")
        first_step = int(os.environ.get(FIRST_STEP, "0"))
        self.writer = SummaryWriter(folder, purge_step=first_step or None)

    return __init__


@patch(
    id="tensorboard-flush",
    reason="a killed run loses up to two minutes of scalars, also of steps that its checkpoint contains",
    upstream="verl/utils/tracking.py, 0.7.0 (SummaryWriter flushes every 120 s)",
    package="verl",
    versions=VERL,
    target="verl.utils.tracking:_TensorboardAdapter.log",
    expects="self.writer.add_scalar(key, data[key], step)",
)
def flush_scalars_of_a_step(original):
    def log(self, data, step):
        original(self, data, step)
        self.writer.flush()

    return log


@patch(
    id="file-logger",
    reason="lines stay in a buffer until the end, and a numpy scalar among the metrics raises",
    upstream="verl/utils/tracking.py, 0.7.0",
    package="verl",
    versions=VERL,
    target="verl.utils.tracking:FileLogger.log",
    expects='self.fp.write(json.dumps(data) + "\\n")',
)
def write_one_line_per_step(original):
    def log(self, data, step):
        numbers = {key: value.item() if hasattr(value, "item") else value for key, value in data.items()}
        self.fp.write(json.dumps({"step": step, "data": numbers}) + "\n")
        self.fp.flush()

    return log


@patch(
    id="no-rollout",
    reason="replayed and made-up answers need no engine; verl always builds one",
    upstream="verl/workers/rollout/base.py, 0.7.0",
    package="verl",
    versions=VERL,
    target="verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    expects="vLLMAsyncRollout",
)
def register_no_rollout(original):
    return {**original, ("none", "async"): "atlasrl.trainer.offline.NoRollout"}


@patch(
    id="fsdp2-idle-experts",
    reason="FSDP2 reduces only parameters that got a gradient on this worker; experts without tokens are skipped, the "
    "workers disagree and the collective aborts or mixes up parameters",
    upstream="transformers/models/deepseek_v3/modeling_deepseek_v3.py, 4.57; torch FSDP2 post_backward",
    package="transformers",
    versions=">=4.56,<5",
    target="transformers.models.deepseek_v3.modeling_deepseek_v3:DeepseekV3MoE.moe",
    expects="if token_indices.numel() > 0",
)
def run_every_expert(original):
    import torch

    def moe(self, hidden_states, topk_indices, topk_weights):
        """[tokens, hidden], [tokens, k], [tokens, k] -> [tokens, hidden]; an idle expert gets a zero gradient."""
        if not torch.is_grad_enabled():
            return original(self, hidden_states, topk_indices, topk_weights)
        output = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
        for index, expert in enumerate(self.experts):
            tokens, slots = torch.where(topk_indices == index)
            weighted = expert(hidden_states[tokens]) * topk_weights[tokens, slots].unsqueeze(-1)
            output.index_add_(0, tokens, weighted.to(output.dtype))
        return output.type(hidden_states.dtype)

    return moe
