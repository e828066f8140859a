"""Run one function over many jobs: here, in processes, or as tasks of a Ray cluster that is already up."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ckpt_tools.errors import Fault

PACKAGE_PARENT = str(Path(__file__).resolve().parent.parent)


def run_here(function: Callable, jobs: Sequence) -> Iterator:
    """Run the jobs one after the other in this process; the easiest to debug."""
    for job in jobs:
        yield function(job)


def _end_with_parent() -> None:
    """Let a worker die with its parent, even when the parent was killed with -9 and could not tell."""
    from multiprocessing import parent_process

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_processes(function: Callable, jobs: Sequence, workers: int) -> Iterator:
    """Run the jobs in worker processes; yield results as they finish, in any order.

    Workers are spawned, not forked: numba and torch hold threads that do not survive a fork.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), initializer=_end_with_parent)
    try:
        for future in as_completed([pool.submit(function, job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool:
        raise Fault(
            "a worker process died (killed, or out of memory); finished shards are kept: run the command again, "
            "with fewer --workers if memory was short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_ray(function: Callable, jobs: Sequence, address: str | None = None) -> Iterator:
    """Run each job as one Ray task on the cluster at `address` (RAY_ADDRESS, else the one on this machine).

    Ray spreads the tasks over the nodes and gives a dead node's task to another. Each task needs one CPU and no
    accelerator. The folders must lie on a file system that every node sees.

    Raises:
        Fault: no cluster answers, or a task failed on its node.
    """
    import ray

    started = not ray.is_initialized()
    if started:
        address = address or os.environ.get("RAY_ADDRESS") or "auto"
        _check_answers(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            raise Fault(
                f"no Ray cluster answers at {address or 'RAY_ADDRESS'}: {error}; start it, or use --workers"
            ) from None
    # Nested, so that it travels by value and can find this package on nodes where it is not installed.
    parent, module, name = PACKAGE_PARENT, function.__module__, function.__qualname__

    def task(job_bytes: bytes):
        import importlib
        import pickle
        import sys

        if parent not in sys.path:
            sys.path.insert(0, parent)
        return getattr(importlib.import_module(module), name)(pickle.loads(job_bytes))

    try:
        yield from _ray_results(ray, task, jobs)
    finally:
        if started:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Try the port first: `ray.init` itself retries a dead address for minutes.

    Raises:
        Fault: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise Fault(
            f"no Ray cluster answers at {address}: {error}; start it, correct RAY_ADDRESS, or use --workers"
        ) from None


def _ray_results(ray, task: Callable, jobs: Sequence) -> Iterator:
    import pickle

    remote = ray.remote(num_cpus=1, scheduling_strategy="SPREAD", max_retries=3)(task)
    waiting = [remote.remote(pickle.dumps(job)) for job in jobs]
    try:
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1)
            for reference in done:
                yield ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (cause if isinstance(cause, Fault) else Fault(f"a shard's Ray task failed: {cause!r}")) from None
    except ray.exceptions.RayError as error:
        raise Fault(f"the Ray cluster failed: {error}; finished shards are kept: run the command again") from None
    finally:
        for reference in waiting:
            ray.cancel(reference)
