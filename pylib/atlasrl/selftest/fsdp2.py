"""verl's own FSDP2 worker, recording what it computes: gradients before clipping and parameters after each step.

This module imports verl; it runs inside a Ray worker.
"""

from __future__ import annotations

import torch.distributed as dist
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.actor import dp_actor
from verl.workers.fsdp_workers import ActorRolloutRefWorker


class RecordingWorker(ActorRolloutRefWorker):
    """A worker of role "actor" that can be set up again in the same process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_up(self, config) -> None:
        """Start over with `config` (verl's actor_rollout_ref): new model and optimizer."""
        self.__init__(config=config, role="actor")
        self.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def watch(self, gradient_scale: dict[int, float]) -> None:
        """Record every following optimizer step; scale the own gradient of the ranks in `gradient_scale`."""
        self._steps, self._partitions = [], []
        step = self.actor._optimizer_step

        def recorded_step():
            named = list(self.actor_module_fsdp.named_parameters())
            gradients = {name: _whole(p.grad) for name, p in named if p.grad is not None}
            norm = step()
            parameters = {name: _whole(tensor) for name, tensor in self.actor_module_fsdp.state_dict().items()}
            self._steps.append({"grad_norm": float(norm), "gradients": gradients, "parameters": parameters})
            return norm

        self.actor._optimizer_step = recorded_step
        loss_of_mode = getattr(self, "_loss_of_mode", dp_actor.get_policy_loss_fn)
        prepare = getattr(self, "_prepare", dp_actor.prepare_dynamic_batch)
        self._loss_of_mode, self._prepare = loss_of_mode, prepare
        factor = gradient_scale.get(dist.get_rank(), 1.0)

        def scaled_loss_of_mode(mode):
            def loss(*args, **kwargs):
                value, metrics = loss_of_mode(mode)(*args, **kwargs)
                return value * factor, metrics

            return loss

        def recorded_prepare(*args, **kwargs):
            micro_batches, rows = prepare(*args, **kwargs)
            self._partitions.append([list(map(int, part)) for part in rows])
            return micro_batches, rows

        dp_actor.get_policy_loss_fn, dp_actor.prepare_dynamic_batch = scaled_loss_of_mode, recorded_prepare

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def recorded(self) -> dict:
        """What this rank recorded: its place, its optimizer steps and its dynamic micro batches."""
        return {
            "rank": dist.get_rank(),
            "data_rank": dist.get_rank(),
            "steps": self._steps,
            "partitions": self._partitions,
        }


def _whole(tensor):
    """The whole tensor of a shard. Collective."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
