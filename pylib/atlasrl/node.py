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
import sys
import time
import traceback

from atlasrl import plan as plans
from atlasrl import processes
from atlasrl.errors import Fault
from atlasrl.outcome import EXHAUSTED, STOPPED
from atlasrl.peers import CLOSING, POLL_SECONDS, Node, check_interrupted, note_signals
from atlasrl.rendezvous import ray_up
from atlasrl.rundir import RunDir, write_atomically
from atlasrl.stages import environment, run_stage


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


def sample_memory(node: Node) -> None:
    """Start the sampler of resident memory; it ends with this process."""
    words = [
        node.plan.python,
        "-m",
        "atlasrl.memory.rss",
        str(node.attempt.memory(node.rank)),
        "--pid",
        str(os.getpid()),
    ]
    processes.spawn(words, env=environment(node), log=node.log("memory"))


def main(run_path: str, number: str, rank: str) -> int:
    note_signals()
    processes.adopt_orphans()
    run = RunDir(run_path)
    attempt = run.attempt(int(number))
    attempt.logs.mkdir(parents=True, exist_ok=True)
    node = Node(plans.load(run), attempt, int(rank))
    code, line = 0, ""
    with contextlib.ExitStack() as stack:
        try:
            if node.plan.recipe.probe.memory:
                sample_memory(node)
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
