"""The gradient self-test: does a layout compute the gradients and updates that the mathematics says?

One recorded batch is trained for two optimizer steps by verl's own workers in a local Ray cluster, driven through
verl's own dispatch with the overrides of a real run, and by an independent single-process reference. Every gradient
and every updated parameter, merged over the workers and named as in the Hugging Face checkpoint, must agree on every
worker.

A rising reward proves nothing: each fault in docs/upstream.md left the reward rising.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from atlasrl.errors import UsageFault
from atlasrl.trainer.layout import Layout
from atlasrl.trainer.patches import WITHOUT
from atlasrl.trainer.selftest_batch import ANSWER, PROMPT, BatchShape
from atlasrl.trainer.selftest_compare import Verdict, judge
from atlasrl.trainer.selftest_reference import Rules, train

SINGLE = Layout()
SHAPE = BatchShape(prompts=8, samples=4)
MINI_BATCHES = 2
"""Optimizer steps: the second one starts from updated parameters and from a history of Adam."""
MICRO_BATCHES = 2
"""Per worker and optimizer step, when the micro batch size is fixed."""


@dataclass(frozen=True)
class Trial:
    """One way to train the batch."""

    backend: str = "megatron"
    layout: Layout = SINGLE
    distributed_optimizer: bool = True
    recompute: str = "none"
    dynamic_batch: bool = False
    """Micro batches packed by their number of tokens."""
    optimizer_on_host: float = 0.0
    clip_grad: float = 1.0
    router_bias_rate: float = 0.0
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
        words += [f"{self.optimizer_on_host:.0%} of the optimizer on the host"] if self.optimizer_on_host else []
        words += [f"clip {self.clip_grad:g}"] if self.clip_grad != 1.0 else []
        words += [f"router bias rate {self.router_bias_rate:g}"] if self.router_bias_rate else []
        words += [f"rank {rank} × {factor:g}" for rank, factor in self.gradient_scale.items()]
        words += [f"without {fix}" for fix in self.without]
        return ", ".join(words)


def run(trials: list[Trial], model: Path | None = None, batch: dict | None = None) -> list[Verdict]:
    """Run trials one after another; those with the same backend, workers and fixes share their processes."""
    with workbench(max(trial.layout.workers for trial in trials), model, batch) as bench:
        return [bench.run(trial) for trial in trials]


@contextmanager
def workbench(workers: int, model: Path | None = None, batch: dict | None = None):
    """A local Ray cluster for trials with up to `workers` workers, a model (made when none is given) and a batch."""
    from atlasrl.trainer import selftest_batch, selftest_model

    os.environ["PYTHONPATH"] = os.pathsep.join([str(_LIBRARY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    apart = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with apart, tempfile.TemporaryDirectory(prefix="selftest-", dir="/tmp") as folder:
        if model is None:
            model = apart.submit(selftest_model.make, Path(folder) / "model").result()
        if batch is None:
            batch = apart.submit(selftest_batch.record, model, SHAPE).result()
        import ray

        ray.init(
            address="local",
            num_cpus=4 * workers + 4,
            resources={"NPU": workers},
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=bool(os.environ.get("ATLASRL_DEBUG")),
            _temp_dir=f"{folder}/ray",
        )
        try:
            yield Workbench(Path(model), batch, Path(folder), apart)
        finally:
            ray.shutdown()


_LIBRARY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
PLUGIN_VARIABLE = "VERL_USE_EXTERNAL_MODULES"
PLUGINS = {"fsdp2": "atlasrl.trainer.cpu", "megatron": "atlasrl.trainer.cpu,atlasrl.trainer.cpu.megatron"}


class Workbench:
    """Runs trials on one cluster; keeps worker processes as long as the next trial can use them.

    The reference runs in a process of its own, which never imports verl or Megatron: fixes of upstream code that are in
    force here must not reach it.
    """

    def __init__(self, model: Path, batch: dict, folder: Path, apart: ProcessPoolExecutor):
        self.model, self.batch, self.folder, self._apart = model, batch, folder, apart
        self._group, self._kind, self._references = None, None, {}

    def run(self, trial: Trial) -> Verdict:
        """Train the batch as `trial` says and compare with the reference."""
        config = compose(trial, self.model, self.folder)
        records = self._train(trial, config)
        steps = partition(trial, records, len(self.batch["responses"]))
        return judge(trial.name, records, self._reference(steps, rules_of(trial)))

    def _reference(self, steps: list, rules: Rules) -> list:
        key = repr((steps, rules))
        if key not in self._references:
            self._references[key] = self._apart.submit(train, self.model, self.batch, steps, rules).result()
        return self._references[key]

    def _train(self, trial: Trial, config) -> list[dict]:
        from tensordict import TensorDict
        from verl import DataProto

        group = self._workers(trial, config)
        group.watch(trial.gradient_scale)
        rows = len(self.batch["responses"])
        lengths = self.batch["attention_mask"].sum(-1).tolist()
        data = DataProto(batch=TensorDict({k: t.clone() for k, t in self.batch.items()}, batch_size=rows))
        data.meta_info = {"temperature": 1.0, "global_token_num": lengths, "multi_turn": False}
        group.update_actor(data)
        return group.recorded()

    def _workers(self, trial: Trial, config):
        """Workers that are set up for a trial: those of the last trial when they fit, otherwise new ones."""
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        from verl.single_controller.ray.base import create_colocated_worker_cls

        kind = (trial.backend, trial.layout.workers, frozenset(trial.without))
        if kind == self._kind:
            self._group._dispatch_info.clear()
            self._group._collect_info.clear()
            self._group.set_up(config)
            return self._group
        self._stop_workers()
        actor = RayClassWithInitArgs(cls=ray.remote(_worker_class(trial.backend)), config=config, role="actor")
        pool = RayResourcePool([trial.layout.workers], use_gpu=True, max_colocate_count=1)
        environment = {WITHOUT: ",".join(trial.without), PLUGIN_VARIABLE: PLUGINS[trial.backend]}
        process = create_colocated_worker_cls({"actor": actor})  # as verl's trainer does, also for a single role
        group = RayWorkerGroup(pool, process, device_name="npu", worker_env=environment)
        self._group = group.spawn(prefix_set={"actor"})["actor"]
        self._kind, self._pool = kind, pool
        self._group.init_model()
        return self._group

    def _stop_workers(self) -> None:
        if self._group is None:
            return
        import ray

        for worker in self._group.workers:
            ray.kill(worker)
        for group in self._pool.pgs:
            ray.util.remove_placement_group(group)
        self._group = self._kind = None


def _worker_class(backend: str):
    if backend == "megatron":
        from atlasrl.trainer.cpu import megatron  # noqa: F401  verl's Megatron worker imports megatron-core
        from atlasrl.trainer.selftest_megatron import RecordingWorker
    else:
        from atlasrl.trainer.selftest_fsdp2 import RecordingWorker
    return RecordingWorker


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
            "optimizer_on_host": trial.optimizer_on_host,
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
    if "ddp-optimizer-flag" in trial.without:  # the override hides the fault that the patch mends
        overrides = [o for o in overrides if "override_ddp_config" not in o.key]
    words = [str(override) for override in overrides]
    words.append("actor_rollout_ref.actor.optim.total_training_steps=10")
    if trial.backend == "megatron":
        transformer = "++actor_rollout_ref.actor.megatron.override_transformer_config"
        words.append(f"{transformer}.moe_router_bias_update_rate={trial.router_bias_rate}")
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
