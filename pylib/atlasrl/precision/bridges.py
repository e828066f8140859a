"""Axis 5: the settings that Megatron gets for one checkpoint by the two ways of verl: mbridge, and its own conversion.

With use_mbridge the bridge turns config.json into Megatron's TransformerConfig, without it verl's `hf_to_mcore_config`
does (then weights come from a dist_ckpt). The two do not agree on routers: load balancing, dtype, groups.
Source: verl 0.7.0, workers/megatron_workers.py `_init_hf_config_and_tf_config`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path

from atlasrl.errors import Fault
from atlasrl.plan import Plan
from atlasrl.precision.effective import Effective

SECTION = "actor_rollout_ref.actor.megatron.override_transformer_config."
OF_A_STAGE = ("num_layers_in_", "pipeline_", "account_for_")
"""Overrides that only a pipeline of several stages takes; here one process holds the whole model."""


def sides(plan: Plan) -> tuple[Effective, Effective]:
    """The settings of a run's model through mbridge and through verl's conversion, with the run's own overrides.

    Loads what the workers of the run load, so that fixes in force there count here. Nothing of the model is built.

    Raises:
        Fault: the checkpoint is not there, or one of the two ways does not know its architecture.
    """
    from atlasrl.trainer import setup

    os.environ[setup.PLUGINS] = ",".join(setup.plugins(plan.recipe.model_copy(update={"backend": "megatron"})))
    overrides = {o.key.lstrip("+").removeprefix(SECTION): o.value for o in plan.overrides if SECTION in o.key}
    overrides = {key: value for key, value in overrides.items() if not key.startswith(OF_A_STAGE)}
    folders = [Path(plan.model), Path(plan.model_input)]
    folder = next((folder for folder in folders if (folder / "config.json").is_file()), None)
    if folder is None:
        raise Fault(f"neither {folders[0]} nor {folders[1]} holds a config.json; is the model on this node?")
    with contextlib.redirect_stdout(sys.stderr):  # verl prints each configuration
        return _sides(folder, overrides)


def _sides(folder: Path, overrides: dict) -> tuple[Effective, Effective]:
    import torch
    import verl  # noqa: F401  loads the plug-ins
    from mbridge import AutoBridge
    from megatron.core import config as core
    from transformers import AutoConfig
    from verl.models.mcore import hf_to_mcore_config

    notes = []
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "num_nextn_predict_layers", 0):
        config.num_nextn_predict_layers = 0
        notes.append("verl's conversion refuses a model with MTP layers; compared without")
    if getattr(config, "quantization_config", None):
        del config.quantization_config
        notes.append("verl's conversion refuses a quantized model; compared as BF16")
    if config.model_type == "deepseek_v3" and not hasattr(core, "set_experimental_flag"):
        core.set_experimental_flag = lambda on: None
        notes.append("verl's conversion needs megatron-core 0.13 (set_experimental_flag): here only mbridge starts")
    with _one_process():
        try:
            bridge = AutoBridge.from_config(config, dtype=torch.bfloat16)
            bridge.set_extra_args(**overrides)
            converted = hf_to_mcore_config(config, torch.bfloat16, **overrides)
            if not getattr(converted, "mtp_num_layers", None):
                converted.mtp_num_layers = None  # 0 and None are one to Megatron
        except (NotImplementedError, ValueError, KeyError) as problem:
            raise Fault(
                f"{folder}: {problem}; mbridge or verl's conversion does not know {config.model_type}"
            ) from None
    return _side("use_mbridge=true", bridge.config, []), _side("use_mbridge=false", converted, notes)


@contextlib.contextmanager
def _one_process():
    """Megatron's groups of a single process: both ways ask them for sizes."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _side(name: str, config, notes: list[str]) -> Effective:
    settings = {SECTION + f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return Effective(name, settings, given=set(settings), notes=notes)


def _plain(value: object) -> object:
    """A setting as YAML would hold it; functions and dtypes by name."""
    if value is None or isinstance(value, bool | int | float | str | list):
        return value
    return getattr(value, "__qualname__", str(value))
