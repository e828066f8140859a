"""Megatron on a CPU, part 1: what megatron-core takes from `torch.cuda`, answered by the CPU, each as a named patch.

Nothing here mends a fault of upstream: on an accelerator none of these patches is needed and none is registered (the
faults are in `trainer/megatron_patches.py`). Collectives run on gloo. Numbers are computed by the same code as on an
accelerator; what is missing on a CPU are streams (there is one), the accelerator's random generator (the CPU's stands
in) and Transformer Engine (megatron-core's own torch layers stand in, see `megatron_bridge.py`).
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.utils._device import _device_constructors

from atlasrl.trainer.patches import patch

PATCHES = (
    "cpu-torch-cuda",
    "cpu-rng",
    "cpu-no-compile",
    "cpu-expert-sizes",
    "cpu-norm",
    "cpu-no-fp8",
    "cpu-adam-step",
    "cpu-checkpoint-writer",
    "cpu-float32",
)
CPU = torch.device("cpu")
MCORE = ">=0.12.1,<0.13"


class Stream:
    """A stream or event of a device that does everything in order: waiting and recording are done already."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def _torch_patch(target: str, expects: str):
    return patch(
        id="cpu-torch-cuda",
        reason="megatron-core asks torch.cuda for its device, streams, random state and tensor types",
        upstream="megatron-core has no device abstraction (megatron/core, 0.12.1)",
        package="torch",
        versions=">=2.4,<3",
        target=target,
        expects=expects,
    )


_STAND_INS = {
    "current_device": lambda: CPU,
    "set_device": lambda device: None,
    "device_count": lambda: 1,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "get_rng_state": lambda device="cpu": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cpu": torch.set_rng_state(state),
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "stream": lambda stream: contextlib.nullcontext(),
}
for _name, _stand_in in _STAND_INS.items():
    _torch_patch(f"torch.cuda:{_name}", expects=f"def {_name}")(lambda original, stand_in=_stand_in: stand_in)
for _name in ("Stream", "Event"):
    _torch_patch(f"torch.cuda:{_name}", expects=f"class {_name}")(lambda original: Stream)
for _name in ("IntTensor", "LongTensor", "FloatTensor", "BFloat16Tensor", "HalfTensor", "ByteTensor", "DoubleTensor"):
    _torch_patch(f"torch.cuda:{_name}", expects=_name)(lambda original, name=_name: getattr(torch, name))


@_torch_patch("torch:Tensor.cuda", expects="method 'cuda'")
def tensor_stays_here(original):
    return lambda self, *args, **kwargs: self


@_torch_patch("torch.nn:Module.cuda", expects="def cuda")
def module_stays_here(original):
    return lambda self, *args, **kwargs: self


@_torch_patch("torch:Tensor.record_stream", expects="method 'record_stream'")
def nothing_to_record(original):
    return lambda self, stream: None


@_torch_patch("torch:Tensor.type", expects="method 'type'")
def cuda_type_name(original):
    """`tensor.type()` is compared with 'torch.cuda.FloatTensor' (optimizer.py, distrib_optimizer.py, clip_grads.py)."""

    def type_(self, *args, **kwargs):
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return type_


_device_constructors()  # remembers the originals: else `with torch.device("meta")` would no longer know them

for _name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like"):

    @_torch_patch(f"torch:{_name}", expects=f"built-in method {_name}")
    def factory_on_cpu(original):
        """device="cuda" is written literally in clip_grads.py, optimizer.py, schedules.py and grad_scaler.py."""

        def factory(*args, **kwargs):
            if str(kwargs.get("device") or "").startswith("cuda"):
                kwargs["device"] = CPU
            return original(*args, **kwargs)

        return factory


@patch(
    id="cpu-no-compile",
    reason="compiling Megatron's fused activations and verl's entropy takes each worker 20 s at its first step, more "
    "than they could save in hours",
    upstream="megatron-core 0.12.1 jit.py, verl 0.7.0 utils/megatron/tensor_parallel.py: always compiled",
    package="torch",
    versions=">=2.4,<3",
    target="torch:compile",
    expects="def compile",
)
def functions_as_written(original):
    def compile(function=None, **options):
        return functools.partial(compile, **options) if function is None else function

    return compile


def _mcore_patch(id: str, reason: str, target: str, expects: str, versions: str = MCORE):
    return patch(
        id=id,
        reason=reason,
        upstream="megatron-core 0.12.1 expects CUDA or Transformer Engine here",
        package="megatron-core",
        versions=versions,
        target=target,
        expects=expects,
    )


_RNG = "the random tracker (dropout, recompute) drives the generator of the CPU instead of the accelerator's"


@_mcore_patch("cpu-rng", _RNG, "megatron.core.tensor_parallel.random:_get_cuda_rng_state", "torch.cuda")
def get_rng_state(original):
    return lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()


@_mcore_patch("cpu-rng", _RNG, "megatron.core.tensor_parallel.random:_set_cuda_rng_state", "_cuda_setRNGState")
def set_rng_state(original):
    return lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


@_mcore_patch(
    "cpu-expert-sizes",
    "split sizes of the expert all-to-all become numbers only for tensors on CUDA; gloo takes numbers only",
    "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
    "tensor.is_cuda",
)
def numbers_for_gloo(original):
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


@_mcore_patch(
    "cpu-norm",
    "the torch norm refuses sequence parallelism, though all it lacks is the mark on its weights that makes "
    "finalize_model_grads sum their gradient over the tensor-parallel ranks; a norm works token by token",
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    "sequence parallel not supported by torch LayerNorm",
)
def norm_with_sequence_parallelism(original):
    def __new__(cls, config, hidden_size, eps=1e-5, **unused):
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(normalized_shape=hidden_size, eps=eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(__new__)


@_mcore_patch(
    "cpu-no-fp8",
    "the distributed optimizer casts its FP8 parameters even when it has none: an error without Transformer Engine",
    "megatron.core.fp8_utils:_quantize_param_shard_impl",
    "Invalid Transformer Engine version",
)
def no_fp8_parameters(original):
    def _quantize_param_shard_impl(model_params, *args, **kwargs):
        return original(model_params, *args, **kwargs) if len(model_params) else None

    return _quantize_param_shard_impl


_ADAM = "torch's AdamW keeps a step counter per parameter; the distributed optimizer's save and load know only Apex's"


@_mcore_patch(
    "cpu-adam-step", _ADAM, "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict", "steps"
)
def state_of_a_fresh_optimizer(original):
    def state_dict(self):
        """Loading starts from `state_dict()` of a fresh optimizer, which must then have one step counter: 0."""
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }
        return original(self)

    return state_dict


@_mcore_patch(
    "cpu-adam-step",
    _ADAM,
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
    "dst_tensors[key].copy_(tensors[key])",
)
def own_step_per_parameter(original):
    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        """Loaded states share ONE step tensor, which AdamW would count up once per parameter: give each its own."""
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"].clone()}
        return original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


@_mcore_patch(
    "cpu-checkpoint-writer",
    "torch 2.9 gave _write_item() a serialization format, which the writer of megatron-core 0.12 does not pass",
    "megatron.core.dist_checkpointing.strategies.filesystem_async:_write_item",
    "def _write_item",
)
def write_in_torch_format(original):
    import inspect

    from torch.distributed.checkpoint import filesystem

    if "serialization_format" not in inspect.signature(original).parameters:
        return original

    def _write_item(*args, **kwargs):
        return original(*args, serialization_format=filesystem.SerializationFormat.TORCH_SAVE, **kwargs)

    return _write_item


@patch(
    id="cpu-float32",
    reason="verl admits only bfloat16 and float16 for Megatron; a proof of exactness needs float32",
    upstream="verl/workers/config/engine.py, 0.7.0",
    package="verl",
    versions=">=0.7.0,<0.8",
    target="verl.workers.config.engine:McoreEngineConfig.__post_init__",
    expects="self.dtype",
)
def allow_float32(original):
    def __post_init__(self):
        dtype = self.dtype
        object.__setattr__(self, "dtype", "bfloat16" if dtype == "float32" else dtype)
        original(self)
        object.__setattr__(self, "dtype", dtype)

    return __post_init__
