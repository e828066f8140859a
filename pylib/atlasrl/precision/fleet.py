"""Run a function on every device of a Ray cluster, one process a device."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atlasrl.errors import Fault
from atlasrl.precision.stress import Report, block, work

PYLIB = Path(__file__).resolve().parents[2]
DEADLINE = 600.0


@contextmanager
def cluster(address: str | None) -> Iterator[None]:
    """Be a client of the cluster at `address` (or RAY_ADDRESS), or of a private one on this machine.

    Raises:
        Fault: it does not answer.
    """
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_worker_niceness", "0")
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(PYLIB), os.environ.get("PYTHONPATH")]))}
    private = {} if address else {"include_dashboard": False}
    try:
        ray.init(address or "local", runtime_env={"env_vars": environment}, log_to_driver=False, **private)
    except Exception as problem:  # Ray raises Exception itself when a daemon does not answer
        where = f"reach Ray at {address}" if address else "start Ray on this machine"
        raise Fault(f"cannot {where}: {' '.join(str(problem).split())}; is the cluster up?") from problem
    try:
        yield
    finally:
        ray.shutdown()


def devices() -> list[tuple[str, str, str | None]]:
    """(node name, node id, Ray resource) of each device; a node without accelerators counts as one device."""
    import ray

    found = []
    for node in sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeName"]):
        resource = next((name for name in ("NPU", "GPU") if node["Resources"].get(name)), None)
        count = int(node["Resources"][resource]) if resource else 1
        found += [(node["NodeName"], node["NodeID"], resource)] * count
    return found


def stress(*, size: int, rounds: int, link: bool = True, task: Callable = work) -> list[Report]:
    """Let every device of the connected cluster do the same work, and hand a block to its neighbour.

    Args:
        task: `(size, rounds, device) -> dict` of Report fields.

    Raises:
        Fault: the cluster has no device.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    found = devices()
    if not found:
        raise Fault("the Ray cluster has no node; wait for it or give --address")
    actors = []
    for _, node, resource in found:
        needs = {"num_gpus": 1} if resource == "GPU" else {"resources": {resource: 1}} if resource else {}
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        actors.append(ray.remote(Device).options(num_cpus=0, scheduling_strategy=strategy, **needs).remote(len(actors)))
    pending = [actor.work.remote(task, size, rounds) for actor in actors]
    results = [_result(reference) for reference in pending]
    if link and len(actors) > 1 and all(not result.get("problem") for result in results):
        address = ray.get(actors[0].address.remote())
        exchanged = [actor.exchange.remote(address, len(actors)) for actor in actors]
        for result, reference in zip(results, exchanged, strict=True):
            told = _result(reference)
            result |= told if "problem" not in told else {"link": f"link: {told['problem']}"}
    unknown = {"device": "?", "kind": "unknown", "digests": [], "seconds": []}
    return [Report(node=name, **{**unknown, **told}) for (name, _, _), told in zip(found, results, strict=True)]


def _result(reference) -> dict:
    """What a device says, or why it does not."""
    import ray

    try:
        return ray.get(reference, timeout=DEADLINE)
    except ray.exceptions.GetTimeoutError:
        return {"problem": f"no answer within {DEADLINE:.0f} s"}
    except ray.exceptions.RayError as problem:
        return {"problem": " ".join(str(getattr(problem, "cause", None) or problem).split())[-200:]}


class Device:
    """One device, in a process of its own."""

    def __init__(self, number: int):
        import torch

        self.number = number
        name = next(
            (kind for kind in ("npu", "cuda") if hasattr(torch, kind) and getattr(torch, kind).is_available()), "cpu"
        )
        self.device = torch.device(name, 0) if name != "cpu" else torch.device("cpu")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_num_threads(1)  # on a CPU, sums must not depend on the number of cores

    def work(self, task: Callable, size: int, rounds: int) -> dict:
        return {"device": self._index(), "kind": self._kind(), **task(size, rounds, self.device)}

    def address(self) -> str:
        import socket

        import ray

        with socket.socket() as free:
            free.bind((ray.util.get_node_ip_address(), 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def exchange(self, address: str, world: int) -> dict:
        """Send a block to the next device and check, bit by bit, the one from the device before."""
        import torch
        import torch.distributed as dist

        backend = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}[self.device.type]
        patience = datetime.timedelta(seconds=DEADLINE / 2)
        dist.init_process_group(backend, init_method=address, rank=self.number, world_size=world, timeout=patience)
        try:
            before, after = (self.number - 1) % world, (self.number + 1) % world
            sent = block(self.number).to(self.device)
            received = torch.empty_like(sent)
            for _ in range(2):  # the first opens the connections
                began = time.perf_counter()
                sending, receiving = dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)
                for request in dist.batch_isend_irecv([sending, receiving]):
                    request.wait()
                same = torch.equal(received.cpu(), block(before))
                seconds = time.perf_counter() - began
        finally:
            dist.destroy_process_group()
        return {
            "link": None if same else f"the block from device number {before} arrived damaged",
            "link_seconds": seconds,
        }

    def _index(self) -> str:
        import ray

        ids = ray.get_runtime_context().get_accelerator_ids()
        return next((held[0] for held in ids.values() if held), str(self.number))

    def _kind(self) -> str:
        import torch

        if self.device.type != "cpu":
            return getattr(torch, self.device.type).get_device_name(0)
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return platform.machine()
