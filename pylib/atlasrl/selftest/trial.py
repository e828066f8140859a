"""One way to train the recorded batch: its name, its recipe, verl's configuration of it, and who trains on what."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from atlasrl.errors import UsageFault
from atlasrl.selftest.batch import ANSWER, PROMPT, BatchShape
from atlasrl.selftest.reference import Rules
from atlasrl.trainer.layout import Layout

SINGLE = Layout()
SHAPE = BatchShape(prompts=8, samples=4)
MINI_BATCHES = 2
"""Optimizer steps: the second one starts from updated parameters and from a history of Adam."""
MICRO_BATCHES = 2
"""Per worker and optimizer step, when the micro batch size is fixed."""
ROUTER_BIAS = "router-bias"
"""The fix that is a setting, not a patch: mbridge moves router biases every step, FSDP2 never does."""
SETTINGS = {
    "ddp-optimizer-flag": "override_ddp_config.use_distributed_optimizer",
    ROUTER_BIAS: "moe_router_bias_update_rate",
}
"""Settings of a run that mend a fault, by the fix that they stand for: they are left out with it."""


@dataclass(frozen=True)
class Trial:
    """One way to train the batch."""

    backend: str = "megatron"
    layout: Layout = SINGLE
    distributed_optimizer: bool = True
    recompute: str = "none"
    dynamic_batch: bool = False
    """Micro batches packed by their number of tokens."""
    clip_grad: float = 1.0
    gradient_scale: dict[int, float] = field(default_factory=dict, hash=False)
    """A planted fault: the own gradient of these ranks is multiplied by a factor."""
    without: tuple[str, ...] = ()
    """Fixes left out, by id: negative controls."""

    @property
    def name(self) -> str:
        words = [self.backend, self.layout.name]
        if self.backend == "megatron" and not self.distributed_optimizer:
            words.append("plain optimizer")
        words += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        words += ["dynamic batch"] if self.dynamic_batch else []
        words += [f"clip {self.clip_grad:g}"] if self.clip_grad != 1.0 else []
        words += [f"rank {rank} × {factor:g}" for rank, factor in self.gradient_scale.items()]
        words += [f"without {fix}" for fix in self.without]
        return ", ".join(words)


def known_fixes() -> list[str]:
    """The ids that a trial can leave out."""
    from atlasrl.trainer.megatron_patches import PATCHES

    return [*PATCHES, ROUTER_BIAS, "fsdp2-idle-experts"]


def recipe_of(trial: Trial, model: Path, answers: int = SHAPE.answers):
    """The recipe that a run with this trial's settings would have."""
    from atlasrl import recipe

    layout, samples = trial.layout, SHAPE.samples
    prompts = answers // samples
    per_step = answers // MINI_BATCHES // layout.data
    if answers % (MINI_BATCHES * MICRO_BATCHES * layout.data):
        raise UsageFault(
            f"the batch has {answers} answers, which do not divide into {MINI_BATCHES} optimizer steps × "
            f"{layout.data} data-parallel workers × {MICRO_BATCHES} micro batches"
        )
    tree = {
        "device": "cpu",
        "backend": trial.backend,
        "devices_per_node": layout.workers,
        "model": {"path": str(model), "compute_dtype": "float32"},
        "data": {"train": "/dev/null", "max_prompt_tokens": PROMPT, "max_response_tokens": ANSWER},
        "parallel": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "expert": layout.expert,
            "expert_tensor": layout.expert_tensor,
            "context": layout.context,
            "distributed_optimizer": trial.distributed_optimizer,
            "recompute": trial.recompute,
        },
        "rollout": {"engine": "cpu", "samples": samples},
        "dapo": {
            "train_batch_size": prompts,
            "mini_batch_size": prompts // MINI_BATCHES,
            "micro_batch_size": per_step // MICRO_BATCHES,
            "tokens_per_device": 2 * (PROMPT + ANSWER) if trial.dynamic_batch else None,
        },
        "optimizer": {
            "learning_rate": Rules.learning_rate,
            "warmup_steps": 0,
            "weight_decay": Rules.weight_decay,
            "clip_grad": trial.clip_grad,
        },
    }
    return recipe.parse(tree, "self-test")


def compose(trial: Trial, model: Path, folder: Path):
    """verl's actor_rollout_ref configuration for a trial, from the overrides of a real run."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    from atlasrl.rundir import RunDir
    from atlasrl.trainer.overrides import CONFIG_NAME, verl_overrides

    recipe = recipe_of(trial, model)
    overrides = verl_overrides(
        recipe,
        nodes=1,
        devices_per_node=trial.layout.workers,
        model=model,
        train="/dev/null",
        val=None,
        run=RunDir(folder / "run"),
    )
    left_out = tuple(SETTINGS[fix] for fix in trial.without if fix in SETTINGS)
    words = [str(override) for override in overrides if not override.key.endswith(left_out)]
    words.append("actor_rollout_ref.actor.optim.total_training_steps=10")
    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose(CONFIG_NAME[trial.backend], words).actor_rollout_ref


def rules_of(trial: Trial) -> Rules:
    """The reference's numbers for a trial."""
    return replace(Rules(), clip_grad=trial.clip_grad, decay_vectors=trial.backend == "fsdp2")


def partition(trial: Trial, records: list[dict], answers: int) -> list[list[list[tuple[list[int], float]]]]:
    """Which rows each worker trains on, as [optimizer step][worker][micro batch] -> (rows, weight).

    verl gives every data-parallel worker a contiguous part of the batch, and cuts that into mini batches and micro
    batches. Packed micro batches are taken from the record. Their weight is where verl's backends differ: Megatron
    weighs micro batches equally, FSDP2 by their share of the rows.
    """
    replicas = trial.layout.data
    of_worker, of_step = answers // replicas, answers // replicas // MINI_BATCHES
    by_replica = {record["data_rank"]: record for record in records}
    steps = []
    for step in range(MINI_BATCHES):
        workers = []
        for replica in range(replicas):
            first = replica * of_worker + step * of_step
            rows = list(range(first, first + of_step))
            if trial.dynamic_batch:
                parts = [[rows[i] for i in part] for part in by_replica[replica]["partitions"][step]]
            else:
                size = of_step // MICRO_BATCHES
                parts = [rows[i : i + size] for i in range(0, of_step, size)]
            by_rows = trial.dynamic_batch and trial.backend == "fsdp2"
            workers.append([(part, len(part) / of_step if by_rows else 1 / len(parts)) for part in parts])
        if sorted(row for worker in workers for part, _ in worker for row in part) != _rows_of(step, replicas, answers):
            raise UsageFault(f"optimizer step {step}: the recorded micro batches are no partition of the batch")
        steps.append(workers)
    return steps


def _rows_of(step: int, replicas: int, answers: int) -> list[int]:
    of_worker, of_step = answers // replicas, answers // replicas // MINI_BATCHES
    firsts = [replica * of_worker + step * of_step for replica in range(replicas)]
    return sorted(row for first in firsts for row in range(first, first + of_step))
