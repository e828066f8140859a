"""verl's own Megatron worker, recording what it computes: gradients before clipping and parameters after each step.

Recorded tensors are whole and carry Hugging Face names: shards of the distributed optimizer, tensor, pipeline and
expert parts are put together, the last three by mbridge's own export. This module imports verl; it runs inside a Ray
worker.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.actor import megatron_actor
from verl.workers.megatron_workers import ActorRolloutRefWorker


class RecordingWorker(ActorRolloutRefWorker):
    """A worker of role "actor" that can be set up again with another layout in the same process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_up(self, config) -> None:
        """Start over with `config` (verl's actor_rollout_ref): new parallel groups, model and optimizer."""
        _forget_parallel_groups()
        split = config.actor.megatron
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=split.tensor_model_parallel_size,
            pipeline_model_parallel_size=split.pipeline_model_parallel_size,
            context_parallel_size=split.context_parallel_size,
            expert_model_parallel_size=split.expert_model_parallel_size,
            expert_tensor_parallel_size=split.expert_tensor_parallel_size,
        )
        self.__init__(config=config, role="actor")
        self.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def watch(self, gradient_scale: dict[int, float]) -> None:
        """Record every following optimizer step; scale the own gradient of the ranks in `gradient_scale`."""
        self._steps, self._partitions = [], []
        step, rank = self.actor_optimizer.step, dist.get_rank()

        def recorded_step():
            with _whole_gradients(self.actor_module):
                gradients = {n: p.main_grad.clone() for n, p in self._parameters()}
            outcome = step()
            self._steps.append(
                {
                    "grad_norm": float(outcome[1]),
                    "gradients": self._export(gradients),
                    "parameters": self._export(),
                }
            )
            return outcome

        self.actor_optimizer.step = recorded_step
        model_config = megatron_actor.get_model_config(self.actor_module[0])
        finalize = model_config.finalize_model_grads_func

        def scaled_finalize(model, *args, **kwargs):
            for chunk in model:
                for parameter in chunk.parameters():
                    parameter.main_grad.mul_(gradient_scale.get(rank, 1.0))
            return finalize(model, *args, **kwargs)

        model_config.finalize_model_grads_func = scaled_finalize
        rearrange = getattr(self, "_rearrange", megatron_actor.rearrange_micro_batches)
        self._rearrange = rearrange

        def recorded_rearrange(*args, **kwargs):
            micro_batches, rows = rearrange(*args, **kwargs)
            self._partitions.append([list(map(int, part)) for part in rows])
            return micro_batches, rows

        megatron_actor.rearrange_micro_batches = recorded_rearrange

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def recorded(self) -> dict:
        """What this rank recorded: its place in the layout, its optimizer steps and its dynamic micro batches."""
        return {
            "rank": dist.get_rank(),
            "data_rank": parallel_state.get_data_parallel_rank(),
            "steps": self._steps,
            "partitions": self._partitions,
        }

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [
            (f"{chunk}.{name}", parameter)
            for chunk, module in enumerate(self.actor_module)
            for name, parameter in module.named_parameters()
        ]

    def _export(self, tensors: dict | None = None) -> dict:
        """Whole tensors by Hugging Face name: the parameters, or `tensors` in their place. Collective."""
        parameters = self._parameters()
        kept = [parameter.data.clone() for _, parameter in parameters]
        try:
            if tensors is not None:
                for name, parameter in parameters:
                    parameter.data.copy_(tensors[name])
            exported = self.bridge.export_weights(self.actor_module)
            whole = {name: tensor.detach().clone() for name, tensor in exported}
        finally:
            for (_, parameter), data in zip(parameters, kept, strict=True):
                parameter.data.copy_(data)
        if tensors is not None:  # router biases are buffers: they have no gradient
            whole = {name: t for name, t in whole.items() if not name.endswith("e_score_correction_bias")}
        return whole


_PRISTINE = {name: value for name, value in vars(parallel_state).items() if name[0] == "_" and name.isupper()}


def _forget_parallel_groups() -> None:
    """Undo `initialize_model_parallel`; destroy_model_parallel() of 0.12 leaves the embedding ranks behind."""
    parallel_state.destroy_model_parallel()
    vars(parallel_state).update(_PRISTINE)


@contextmanager
def _whole_gradients(modules):
    """Let `main_grad` hold the whole reduced gradient: with the distributed optimizer each rank has only its shard."""
    buffers = [b for module in modules for b in [*module.buffers, *module.expert_parallel_buffers]]
    kept = [buffer.grad_data.clone() for buffer in buffers]
    for buffer in buffers:
        if not buffer.ddp_config.use_distributed_optimizer:
            continue
        for bucket in buffer.buckets:
            size = dist.get_world_size(buffer.data_parallel_group)
            own = dist.get_rank(buffer.data_parallel_group)
            shard = bucket.grad_data.view(size, -1)[own].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=buffer.data_parallel_group)
    try:
        yield
    finally:
        for buffer, data in zip(buffers, kept, strict=True):
            buffer.grad_data.copy_(data)
