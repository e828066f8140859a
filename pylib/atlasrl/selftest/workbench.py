"""Where self-test trials run: a local Ray cluster with verl's workers, and a clean process for the reference."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from atlasrl.errors import Fault
from atlasrl.selftest import batch as batches
from atlasrl.selftest import model as models
from atlasrl.selftest.compare import Verdict, judge
from atlasrl.selftest.reference import Rules, train
from atlasrl.selftest.trial import ROUTER_BIAS, SHAPE, Trial, compose, partition, recipe_of, rules_of
from atlasrl.trainer import alarms
from atlasrl.trainer.patches import WITHOUT
from atlasrl.trainer.setup import PLUGINS, PYLIB, plugins

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # workers share the cores
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_prestart_worker_first_driver": "0",  # workers without verl's runtime environment, used by nobody
    "RAY_worker_niceness": "0",  # Ray's default of 15 starves the workers of a busy machine
}


def run(
    trials: list[Trial], *, model: Path | None = None, batch: Path | None = None, record: Path | None = None
) -> Iterator[Verdict]:
    """Run trials one after another; neighbours with the same backend, workers and fixes share their processes.

    Args:
        model: checkpoint folder; a tiny random DeepSeek-V3 when absent.
        batch: a batch written by an earlier `record`.
    """
    loaded = batches.load(batch) if batch else None
    with workbench(max(trial.layout.workers for trial in trials), model, loaded) as bench:
        if record:
            batches.save(bench.batch, record)
        for trial in trials:
            yield bench.run(trial)


@contextmanager
def workbench(workers: int, model: Path | None = None, batch: dict | None = None):
    """A local Ray cluster for trials with up to `workers` workers, a model (made when none is given) and a batch."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PYLIB), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    apart = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with apart, tempfile.TemporaryDirectory(prefix="selftest-", dir="/tmp") as folder:
        making = None if model else apart.submit(models.make, Path(folder) / "model")
        with _local_ray(workers, f"{folder}/ray"):
            model = Path(model or making.result())
            if batch is None:
                batch = apart.submit(batches.record, model, SHAPE).result()
            yield Workbench(model, batch, Path(folder), apart)


@contextmanager
def _local_ray(workers: int, folder: str):
    import logging

    import ray

    debug = bool(os.environ.get("ATLASRL_DEBUG"))
    logging.getLogger("ray._private.accelerators.npu").setLevel(logging.CRITICAL)  # "No module named 'acl'"
    ray.init(
        address="local",
        num_cpus=4 * workers + 4,
        resources={"NPU": workers},
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=debug,
        logging_level=logging.INFO if debug else logging.ERROR,
        _temp_dir=folder,
    )
    try:
        yield
    finally:
        ray.shutdown()


class Workbench:
    """Runs trials on one cluster; keeps worker processes as long as the next trial can use them.

    The reference runs in a process of its own, which never imports verl or Megatron: fixes of upstream code that are in
    force here must not reach it.
    """

    def __init__(self, model: Path, batch: dict, folder: Path, apart: ProcessPoolExecutor):
        self.model, self.batch, self.folder, self._apart = model, batch, folder, apart
        self._group, self._kind, self._references = None, None, {}

    def run(self, trial: Trial) -> Verdict:
        """Train the batch as `trial` says and compare with the reference.

        Raises:
            Fault: a worker died or raised.
        """
        import ray

        answers, rules = len(self.batch["responses"]), rules_of(trial)
        if not trial.dynamic_batch:  # otherwise the workers say how they packed it
            self._reference(partition(trial, [], answers), rules)
        try:
            records = self._train(trial)
        except ray.exceptions.RayError as problem:
            self._stop_workers()
            cause = getattr(problem, "cause", None) or problem
            text = " ".join(str(cause).split())[:300]
            raise Fault(f"{trial.name}: a worker failed with {type(cause).__name__}: {text}") from problem
        return judge(trial.name, records, self._reference(partition(trial, records, answers), rules).result())

    def _reference(self, steps: list, rules: Rules) -> Future:
        key = repr((steps, rules))
        if key not in self._references:
            self._references[key] = self._apart.submit(train, self.model, self.batch, steps, rules)
        return self._references[key]

    def _train(self, trial: Trial) -> list[dict]:
        from tensordict import TensorDict
        from verl import DataProto

        group = self._workers(trial, compose(trial, self.model, self.folder))
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

        kind = (trial.backend, trial.layout.workers, frozenset(trial.without) - {ROUTER_BIAS})
        if kind == self._kind:
            self._group._dispatch_info.clear()
            self._group._collect_info.clear()
            self._group.set_up(config)
            return self._group
        self._stop_workers()
        actor = RayClassWithInitArgs(cls=ray.remote(_worker_class(trial.backend)), config=config, role="actor")
        pool = RayResourcePool([trial.layout.workers], use_gpu=True, max_colocate_count=1)
        # a negative control must show its wrong numbers, so the alarms that would end it first are off too
        switched_off = [*trial.without, *alarms.PATCHES] if trial.without else []
        environment = {WITHOUT: ",".join(switched_off), PLUGINS: ",".join(plugins(recipe_of(trial, self.model)))}
        with redirect_stdout(sys.stderr):  # verl prints the name of the class; stdout is for verdicts
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
        from atlasrl.selftest.megatron import RecordingWorker
        from atlasrl.trainer.cpu import megatron  # noqa: F401  verl's Megatron worker imports megatron-core
    else:
        from atlasrl.selftest.fsdp2 import RecordingWorker
    return RecordingWorker
