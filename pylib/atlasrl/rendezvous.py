"""How the nodes of an attempt become one Ray cluster, stay one, and part in order.

Rank 0 starts first and announces its address once its GCS answers; the others join, a window at a time; rank 0 waits
for all of them and then watches them. At the end the others leave first.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator

from atlasrl import plan as plans
from atlasrl import raycluster
from atlasrl.errors import Fault
from atlasrl.launch import addresses, checkin, ports
from atlasrl.logs import last_line
from atlasrl.peers import CLOSING, POLL_SECONDS, Node, Stopped, check_interrupted
from atlasrl.rundir import write_atomically

DISMISS_SECONDS = 30


@contextlib.contextmanager
def ray_up(node: Node, env: dict[str, str]) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """Start this node's Ray and, on rank 0, wait for all others.

    Yields:
        The environment for clients of the cluster, and a check that raises a Fault when this node's Ray or any other
        node is gone.
    """
    plan, attempt = node.plan, node.attempt
    limits = plan.site.ray
    deadline = limits.deadline + limits.deadline_per_node * (plan.nodes - 1)
    with contextlib.ExitStack() as stack:
        slot, slots = plans.port_slot(plan, node.rank)
        agreed = ports.agreed(os.environ.get("ATLASRL_PORTS"))
        chosen = stack.enter_context(ports.take(plans.port_seed(plan, attempt.number), slot, slots, agreed))
        address = checkin.own_address(plan, node.name, node.rank)
        here = plans.ray_node(plan, attempt.number, node.rank, address, chosen)
        env = env | chosen.environment() | addresses.environment(here.address, plan.site.nic)
        raycluster.sweep(plan.ray_temp(number, 0).parent for number in range(1, attempt.number))
        raycluster.make_temp(here.temp)
        stack.callback(raycluster.remove_temp, here.temp)
        if node.rank == 0:
            head = here.gcs_address
        else:
            head = wait_for_head(node, deadline)
            wait_for_turn(node, deadline)
        node.say("starting Ray", f"at {here.address}, ports {chosen.first} and up ({chosen.reason})")
        node.run.record("ports", attempt=attempt.number, node=node.name, address=here.address, **chosen.as_dict())
        daemon = raycluster.Daemon(here, raycluster.start_command(plan.python, here, head), env, node.log("ray"))
        stack.callback(daemon.close)
        client = env | {"RAY_ADDRESS": head}
        check = daemon.check
        if node.rank == 0:
            watch = raycluster.Watch(head, client, node.log("rayprobe"))
            stack.callback(watch.close)
            stack.callback(dismiss, node)
            check = gather(node, watch, daemon.check, head, deadline)
        yield client, check


def gather(node: Node, watch: raycluster.Watch, own_ray: Callable, head: str, deadline: float) -> Callable[[], None]:
    """On rank 0: let the others in, wait for all of them, and return the check that they are still there."""
    attempt, plan = node.attempt, node.plan
    announced: list[str] = []
    started = time.monotonic()

    def while_waiting() -> None:
        own_ray()
        check_interrupted(node)
        if watch.alive is not None and sorted(watch.alive) != announced:
            announced[:] = sorted(watch.alive)
            write_atomically(attempt.cluster, json.dumps({"alive": announced}) + "\n")
            write_atomically(attempt.head, json.dumps({"address": head}) + "\n")
        for rank in range(1, plan.nodes):
            said = node.heard_of(rank)
            if said["state"] in ("failed", "died"):
                raise Fault(said["message"])

    def last_words(name: str) -> str:
        rank = int(name.removeprefix("node"))
        said = node.heard_of(rank)
        words = f"{said['state']} {said['message']}".strip()
        return f"{words}: {last_line(node.log('ray', rank))}" if said["state"] == "starting Ray" else words

    raycluster.wait_for_nodes(watch, plan.nodes, plan.devices_per_node, deadline, while_waiting, last_words)
    seconds = round(time.monotonic() - started, 1)
    node.run.record("ray_up", attempt=attempt.number, nodes=plan.nodes, seconds=seconds, resources=watch.alive)
    node.say("Ray is up", f"{plan.nodes} nodes × {plan.devices_per_node} devices in {seconds} s")

    def check() -> None:
        own_ray()
        watch.look()
        for rank in range(1, plan.nodes):
            said = node.heard_of(rank)
            if said["state"] in ("failed", "died"):
                raise Fault(said["message"])
            if f"node{rank}" not in (watch.alive or {}):
                raise Fault(f"node{rank} is gone from Ray; last seen: {last_words(f'node{rank}')}")
        if watch.failed:
            raise Fault(f"{node.name}: the head's GCS does not answer any more: {last_line(node.log('rayprobe'))}")

    return check


def dismiss(node: Node) -> None:
    """On rank 0: let the others end their Ray first. Their agents would look for a lost GCS for a minute."""
    node.say("closing")
    limit = time.monotonic() + DISMISS_SECONDS
    others = set(range(1, node.plan.nodes))
    while others and time.monotonic() < limit:
        others = {rank for rank in others if node.heard_of(rank)["state"] not in ("ended", "failed", "died", "silent")}
        time.sleep(POLL_SECONDS)


def wait_for_head(node: Node, deadline: float) -> str:
    """On the other ranks: the GCS address, once rank 0's Ray answers."""
    return _wait(node, deadline, "rank 0's Ray", lambda: json.loads(node.attempt.head.read_text())["address"])


def wait_for_turn(node: Node, deadline: float) -> None:
    """Let only so many nodes join at a time: Ray gives a raylet 30 s, and Python imports share this machine."""
    window = node.plan.site.joining_at_once

    def turn() -> bool:
        return len(json.loads(node.attempt.cluster.read_text())["alive"]) + window > node.rank

    if 0 < window <= node.rank:
        what = f"node{node.rank - window} to join first, {window} at a time"
        _wait(node, deadline, what, lambda: turn() or None)


def _wait(node: Node, deadline: float, what: str, attain: Callable):
    limit = time.monotonic() + deadline
    node.say("waiting for", what)
    while time.monotonic() < limit:
        check_interrupted(node)
        if (said := node.heard_of(0))["state"] in (*CLOSING, "died"):
            raise Stopped(f"{node.name}: rank 0 gave up: {said['message']}")
        with contextlib.suppress(OSError, ValueError):
            if (attained := attain()) is not None:
                return attained
        time.sleep(POLL_SECONDS)
    raise Fault(f"{node.name}: waited {deadline:.0f} s for {what}; node0 {node.heard_of(0)['state']}")
