"""A CPU as verl's device: what verl's workers call on `torch.<device>` and torch.cpu lacks. Collectives run on gloo."""

from __future__ import annotations

import resource
import warnings

import torch

from atlasrl.trainer.patches import ABSENT, patch

# verl enters autocast on every micro batch; in float32 the CPU says each time that it does not cast.
warnings.filterwarnings("ignore", message="In CPU autocast")


def peak_memory(*_args) -> int:
    """Peak resident set of this process in bytes: the honest memory figure of a CPU device."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


STAND_INS = {
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "memory_allocated": peak_memory,
    "memory_reserved": peak_memory,
    "max_memory_allocated": peak_memory,
    "max_memory_reserved": peak_memory,
    "reset_peak_memory_stats": lambda *_: None,
    "reset_accumulated_memory_stats": lambda *_: None,
}

for _name, _stand_in in STAND_INS.items():
    patch(
        id="cpu-device",
        reason="verl asks torch.<device> for random state, memory figures and cache control",
        upstream="torch.cpu is not a full device module (torch 2.13)",
        package="torch",
        versions=">=2.4,<3",
        target=f"torch:cpu.{_name}",
        expects=ABSENT,
    )(lambda _absent, stand_in=_stand_in: stand_in)


@patch(
    id="cpu-gloo",
    reason='verl asks for "cpu:gloo,cpu:nccl": one device twice, and no NCCL without a GPU',
    upstream="verl/workers/fsdp_workers.py and utils/device.py get_nccl_backend, 0.7.0",
    package="torch",
    versions=">=2.4,<3",
    target="torch.distributed:init_process_group",
    expects="def init_process_group",
)
def init_on_gloo(original):
    def init_process_group(backend=None, *args, **kwargs):
        return original("gloo" if isinstance(backend, str) and "nccl" in backend else backend, *args, **kwargs)

    return init_process_group


@patch(
    id="cpu-no-cache-flush",
    reason="there is no allocator cache to flush; four gc.collect() per rollout cost up to 0.7 s",
    upstream="verl/utils/memory_utils.py, 0.7.0",
    package="verl",
    versions=">=0.7.0,<0.8",
    target="verl.utils.memory_utils:aggressive_empty_cache",
    expects="gc.collect()",
)
def nothing_to_flush(original):
    return lambda *args, **kwargs: None


@patch(
    id="cpu-rollout",
    reason="verl knows vLLM and SGLang only; its own HFRollout is not registered and cannot be constructed",
    upstream="verl/workers/rollout/base.py, 0.7.0",
    package="verl",
    versions=">=0.7.0,<0.8",
    target="verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    expects="vLLMAsyncRollout",
)
def register_cpu_rollout(original):
    return {**original, ("cpu", "async"): "atlasrl.trainer.cpu.rollout.CpuRollout"}


PATCHES = ("cpu-device", "cpu-gloo", "cpu-no-cache-flush", "cpu-rollout")
