"""What one node of a job does: `python -m atlasrl.node RUN ATTEMPT RANK`.

    every rank   preflight stage, ports, Ray
    rank 0       owns the run; stages inputs (first), cast, train, export on the cluster; writes the outcome, last
    other ranks  keep their raylet alive until the outcome is there

Everything is polled with deadlines in one thread: a stage, the own raylet, the other nodes, a stop request, a signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from atlasrl import plan as plans
from atlasrl import processes, raycluster
from atlasrl.errors import Fault
from atlasrl.launch import addresses, ports
from atlasrl.logs import last_line
from atlasrl.plan import Plan
from atlasrl.rundir import AttemptDir, RunDir, write_atomically

STOPPED, EXHAUSTED = 85, 86  # exit codes of the trainer, and of a node, beside 0 and 1
POLL_SECONDS = 0.1
DISMISS_SECONDS = 30
RAY_PATIENCE_SECONDS = 5
PATIENCE_SECONDS = 10  # between SIGTERM and SIGKILL for a stage: a checkpoint in flight is given up, not awaited
CLOSING = ("closing", "ended", "failed")
HOST = os.uname().nodename
DROPPED = ("RAY_ADDRESS", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


class Stopped(Fault):
    """Somebody asked the attempt to end."""

    exit_code = STOPPED


@dataclass
class Node:
    """One node's view of its attempt."""

    plan: Plan
    attempt: AttemptDir
    rank: int

    @property
    def name(self) -> str:
        return f"node{self.rank}"

    @property
    def run(self) -> RunDir:
        return self.attempt.run

    def log(self, what: str, rank: int | None = None) -> Path:
        return self.attempt.logs / f"{what}-node{self.rank if rank is None else rank}.log"

    def say(self, state: str, message: str = "") -> None:
        """Tell the other nodes and the log what this node does."""
        path = self.attempt.node(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        said = {"state": state, "message": message, "host": HOST, **processes.identity(os.getpid())}
        write_atomically(path, json.dumps(said) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {self.name} {state} {message}".rstrip(), flush=True)

    def heard_of(self, rank: int) -> dict:
        """What another node said last; `died` when it lived on this host and its process is gone."""
        try:
            said = json.loads(self.attempt.node(rank).read_text())
        except (OSError, ValueError):
            return {"state": "silent", "message": "its task has not started"}
        if said["host"] == HOST and said["state"] not in ("ended", "failed") and not processes.is_alive(said):
            return {
                "state": "died",
                "message": f"node{rank}: its process {said['pid']} is gone; it was: {said['state']}",
            }
        return said


# --- interruptions ----------------------------------------------------------------------------------------------------

_signals: list[int] = []


def _note_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: _signals.append(received))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def check_interrupted(node: Node, *, saves_itself: bool = False) -> None:
    """Raise Stopped when a signal came or a stop was requested.

    `saves_itself`: the running stage sees a stop request that asks for a checkpoint and ends by itself.
    """
    if _signals:
        raise Stopped(f"{node.name} received {signal.Signals(_signals[0]).name}")
    if node.attempt.stop_request.exists():
        with contextlib.suppress(OSError, ValueError):
            if saves_itself and json.loads(node.attempt.stop_request.read_text()).get("save"):
                return
        raise Stopped("stopped on request")


# --- stages -----------------------------------------------------------------------------------------------------------


def environment(node: Node, **extra: str) -> dict[str, str]:
    """The environment of every process of the job on this node: inherited, then the plan's, then what only this
    attempt knows. Ray's address and proxies of the submitting shell would lead elsewhere and are dropped."""
    inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
    planned = {name: str(value.value) for name, value in node.plan.environment.items()}
    own = {
        "ATLASRL_RUN": str(node.run.path),
        "ATLASRL_ATTEMPT": str(node.attempt.number),
        "ATLASRL_NODE": node.name,
        "ATLASRL_RANK": str(node.rank),
        "ATLASRL_PYTHON": node.plan.python,
        "ATLASRL_INPUT_SCRIPT": str(node.plan.recipe.inputs.script if node.plan.recipe.inputs else ""),
        "ATLASRL_MODEL_INPUT": node.plan.model_input,
        "ATLASRL_MODEL": node.plan.model,
    }
    return {**inherited, **planned, **own, **extra}


def run_stage(node: Node, stage: str, env: dict[str, str], check: Callable[[], None]) -> None:
    """Run jobs/stages/<stage>.sh and record it.

    A script says why it had nothing to do in a last line that starts with `skipped:`. ATLASRL_STAGES names another
    folder of scripts, for example with a site's own cast.

    Args:
        check: called while the stage runs; raises to end it.

    Raises:
        Fault: the stage failed; the message ends with the last line of its log.
    """
    log = node.log(stage)
    size = log.stat().st_size if log.exists() else 0
    node.say("stage", stage)
    node.run.record("stage_start", attempt=node.attempt.number, node=node.name, stage=stage)
    started = time.monotonic()
    script = Path(env.get("ATLASRL_STAGES") or plans.ROOT / "jobs" / "stages") / f"{stage}.sh"
    process = processes.spawn(["bash", str(script)], env=env, log=log, death_signal=signal.SIGTERM)
    code: int | str = "ended"
    try:
        while (code := process.poll()) is None:
            code = "ended"
            check()
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            processes.end_tree(process, PATIENCE_SECONDS)
        words = last_line(log, size)
        node.run.record(
            "stage_end",
            attempt=node.attempt.number,
            node=node.name,
            stage=stage,
            exit=code,
            seconds=round(time.monotonic() - started, 2),
            **({"skipped": words.removeprefix("skipped:").strip()} if words.startswith("skipped:") else {}),
        )
    if code != 0:
        failure = Fault(f"{node.name}: stage {stage} failed with exit code {code}: {words.removeprefix('error: ')}")
        failure.exit_code = code if code in (STOPPED, EXHAUSTED) else 1
        raise failure


# --- Ray --------------------------------------------------------------------------------------------------------------


def own_address(node: Node) -> str:
    """The IPv4 address by which the other nodes reach this one."""
    site = node.plan.site
    if site.kind == "local":
        return plans.local_address(node.rank)
    if site.nic:
        return addresses.of_interface(site.nic, node.name)
    return addresses.of_host(os.uname().nodename, node.name)


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
        here = raycluster.describe(plan, attempt.number, node.rank, own_address(node), chosen)
        env = env | chosen.environment() | addresses.environment(here.address, plan.site.nic)
        raycluster.make_temp(here.temp)
        stack.callback(raycluster.remove_temp, here.temp)
        if node.rank == 0:
            head = here.gcs_address
        else:
            head = wait_for_head(node, deadline)
            wait_for_turn(node, limits.join_window, deadline)
        node.say("starting Ray", f"at {here.address}, ports {chosen.first} and up ({chosen.reason})")
        node.run.record("ports", attempt=attempt.number, node=node.name, address=here.address, **chosen.as_dict())
        ray = processes.spawn(raycluster.start_command(plan.python, here, head), env=env, log=node.log("ray"))
        stack.callback(processes.end_tree, ray, RAY_PATIENCE_SECONDS)
        client = env | {"RAY_ADDRESS": head}

        def check() -> None:
            if (code := ray.poll()) is not None:
                raise Fault(f"{node.name}: Ray ended with exit code {code}: {last_line(node.log('ray'))}")

        if node.rank == 0:
            watch = raycluster.Watch(head, client, node.log("rayprobe"))
            stack.callback(watch.close)
            stack.callback(dismiss, node)
            check = gather(node, watch, check, head, deadline)
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


def wait_for_turn(node: Node, window: int, deadline: float) -> None:
    """Let at most `window` nodes join at a time: Ray gives a raylet 30 s, and Python imports share this machine."""

    def turn() -> bool:
        return not window or len(json.loads(node.attempt.cluster.read_text())["alive"]) + window > node.rank

    _wait(node, deadline, f"node{node.rank - window} to join first", lambda: turn() or None)


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


# --- the two roles ----------------------------------------------------------------------------------------------------


def lead(node: Node, resume_from: str | None) -> None:
    """Rank 0: all stages, in order, on a cluster that is watched."""
    env = environment(node, ATLASRL_RESUME_FROM=resume_from or "")
    for stage in ("inputs", "preflight"):
        run_stage(node, stage, env, lambda: check_interrupted(node))
    with ray_up(node, env) as (client, cluster_is_whole):
        for stage in ("cast", "train", "export"):

            def check(stage: str = stage) -> None:
                check_interrupted(node, saves_itself=stage == "train")
                cluster_is_whole()

            run_stage(node, stage, client, check)


def follow(node: Node) -> None:
    """The other ranks: keep the raylet alive until rank 0 is done."""
    env = environment(node)
    run_stage(node, "preflight", env, lambda: check_interrupted(node))
    with ray_up(node, env) as (_, own_ray_lives):
        node.say("serving")
        while (said := node.heard_of(0))["state"] not in CLOSING:
            check_interrupted(node)
            if said["state"] == "died":
                raise Fault(f"{node.name}: {said['message']}")
            own_ray_lives()
            time.sleep(POLL_SECONDS)


def main(run_path: str, number: str, rank: str) -> int:
    _note_signals()
    processes.adopt_orphans()
    run = RunDir(run_path)
    attempt = run.attempt(int(number))
    attempt.logs.mkdir(parents=True, exist_ok=True)
    node = Node(plans.load(run), attempt, int(rank))
    code, line = 0, ""
    with contextlib.ExitStack() as stack:
        try:
            if node.rank == 0:
                job, resume_from = os.environ.get("ATLASRL_JOB"), json.loads(attempt.job.read_text())["resume_from"]
                stack.enter_context(run.own(attempt=attempt.number, job=job))
                run.record("attempt_start", attempt=attempt.number, job=job, resume_from=resume_from)
                lead(node, resume_from)
            else:
                follow(node)
        except Fault as fault:
            code, line = fault.exit_code, str(fault)
        except Exception as problem:  # a bug of ours must still be told, recorded and cleaned up after
            traceback.print_exc()
            code, line = 1, f"{node.name}: internal error {type(problem).__name__}: {problem}"
        processes.end_descendants(patience=3)
        if node.rank == 0:
            state = {0: "done", STOPPED: "stopped", EXHAUSTED: "exhausted"}.get(code, "failed")
            run.record("attempt_end", attempt=attempt.number, state=state, exit=code, message=line)
            write_atomically(attempt.outcome, json.dumps({"state": state, "exit": code, "message": line}) + "\n")
        node.say("ended" if code in (0, STOPPED) else "failed", line)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
