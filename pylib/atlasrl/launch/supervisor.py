"""One supervisor per node, for the whole life of a job. Imports neither Ray nor torch, and outlives what it starts.

rank 0      opens an attempt, lets all nodes check in, starts it everywhere, watches the end of the allocation,
            and when the attempt has ended decides: done, restart here, requeue, or stop and say why
the others  answer, start their node process when told, report its end, wait for the next word
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from atlasrl import checkpoints, outcome, processes, raycluster
from atlasrl import plan as plans
from atlasrl.errors import Fault
from atlasrl.launch import allocation, checkin, hostlist, submission
from atlasrl.launch.meeting import POLL_SECONDS, REPORT_SECONDS, Meeting, read
from atlasrl.outcome import Facts, Outcome
from atlasrl.rundir import AttemptDir, RunDir, read_json_lines, write_atomically
from atlasrl.site import Life

LAST_CALL_SECONDS = 60  # before the allocation's end: an unfinished save is given up, while a requeue is possible
LOOK_SECONDS = 5  # between looks at the clock of the allocation
EARLY_SECONDS = 120  # Slurm warns of the time limit up to a minute early; our own clock is better
BALLAST_BYTES = 2**20
STATES = {"done": "done", "stopped": "stopped", "data exhausted": "exhausted"}


class Allocation(Protocol):
    """The nodes of a job, as a scheduler gave them."""

    job: str
    rank: int
    names: list[str]
    incarnation: str
    is_fresh: bool

    def end(self) -> float | None: ...

    def requeue(self) -> None: ...


class Supervisor:
    """The supervisor of one node."""

    def __init__(self, run: RunDir, token: str, here: Allocation):
        self.run, self.here = run, here
        self.plan = plans.load(run)
        self.meeting = Meeting(run.path / "jobs" / f"{here.incarnation}-{token}", here.names, here.rank)
        self.node: subprocess.Popen | None = None
        self.signals: list[int] = []
        self.next_look = 0.0

    def supervise(self, first_attempt: int) -> int:
        """Live through the job; returns the exit code of the task."""
        processes.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):  # submitit's own handlers would requeue
            signal.signal(number, lambda received, _: self.signals.append(received))
        try:
            return self.lead(first_attempt) if self.here.rank == 0 else self.follow()
        finally:
            processes.end_descendants(patience=2)

    @property
    def is_told_to_end(self) -> bool:
        return bool({signal.SIGTERM, signal.SIGINT} & set(self.signals))

    # --- rank 0 ---

    def lead(self, first_attempt: int) -> int:
        attempt = self.run.attempt(first_attempt) if self.here.is_fresh else self.next_attempt()
        self.close_earlier_attempts(attempt)
        self.ballast.write_bytes(bytes(BALLAST_BYTES))
        while True:
            found = self.run_attempt(attempt)
            if found.action != "restart":
                break
            attempt = self.next_attempt()
        self.meeting.order(do="leave")
        if found.action == "requeue":
            self.requeue(attempt)
            return 0
        return 0 if found.action in ("done", "leave") or found.kind == "stopped" else 1

    @property
    def ballast(self) -> Path:
        """Room on the run's disk that is given up when the disk is full, so that the end can be written down."""
        return self.meeting.folder / "ballast"

    def make_room(self) -> bool:
        """Whether the disk is full; if so, there is now room to write the end down."""
        full = shutil.disk_usage(self.run.path).free < BALLAST_BYTES
        if full:
            self.ballast.unlink(missing_ok=True)
        return full

    def newest_checkpoint(self) -> str | None:
        newest = next(iter(checkpoints.complete(self.run)), None)
        return str(newest.path) if newest else None

    def next_attempt(self) -> AttemptDir:
        """A new attempt in this allocation, from the newest complete checkpoint."""
        return submission.open_attempt(self.plan, self.newest_checkpoint(), job=self.here.job)

    def close_earlier_attempts(self, current: AttemptDir) -> None:
        """Write down how attempts ended that could not do so themselves: their head lost its power, or was killed."""
        nodes = {event["attempt"]: event["nodes"] for event in self.run.events() if event["event"] == "allocated"}
        for attempt in self.run.attempts():
            if attempt.number < current.number and attempt.ending() is None:
                before = hostlist.compress(nodes.get(attempt.number, ["unknown nodes"]))
                words = (
                    f"ended without a word on {before}: a node was lost, or the scheduler killed the job; now on "
                    f"{hostlist.compress(self.here.names)}"
                )
                self.settle(attempt, Outcome("node failure", "leave", words), code=1)

    def run_attempt(self, attempt: AttemptDir) -> Outcome:
        """Check in, run, and classify one attempt."""
        number, names = attempt.number, self.here.names
        self.run.record("allocated", attempt=number, job=self.here.job, incarnation=self.here.incarnation, nodes=names)
        try:
            first_port = self.check_in(attempt)
        except Fault as fault:
            code, message = fault.exit_code, str(fault)
            lost = self.meeting.silent("answered", number)
            stage_exit = None if lost or self.signals else outcome.FAULT
        else:
            self.meeting.order(do="run", attempt=number, ports=first_port)
            code, message = self.run_node(attempt, first_port)
            full = self.make_room()
            self.await_all("ended", number, REPORT_SECONDS)
            lost = self.meeting.silent("ended", number)
            stage_exit = outcome.FAULT if full else self.failed_stage(number)
            message = f"No space left on the disk of {self.run.path}: {message}" if full else message
        facts = Facts(
            exit=code,
            message=message,
            stage_exit=stage_exit,
            asked=self.asked(attempt),
            lost=tuple(lost),
            fruitless=outcome.fruitless_attempts(self.run.events()),
            seconds_left=end - time.time() if (end := self.here.end()) else None,
            seconds_needed=2 * lead_seconds(self.run, self.plan.site.life)[0],
        )
        found = outcome.classify(facts, self.plan.site.life)
        self.settle(attempt, found, code)
        return found

    def check_in(self, attempt: AttemptDir) -> int:
        """Let every node answer, and agree on the ports.

        Returns:
            The first port of the block.

        Raises:
            Fault: nodes that did not answer in time, or everything that is wrong on any of them.
        """
        meeting, number = self.meeting, attempt.number
        started, limits, nodes = time.monotonic(), self.plan.site.ray, len(self.here.names)
        deadline = limits.deadline + limits.deadline_per_node * (nodes - 1)
        meeting.order(do="answer", attempt=number)
        meeting.report("answered", number, answer=checkin.answer(self.plan, meeting.name, self.here.rank))
        self.await_all("answered", number, deadline)
        if silent := meeting.silent("answered", number):
            raise Fault(
                f"{nodes - len(silent)}/{nodes} nodes answered within {deadline:.0f} s; missing: {', '.join(silent)}; "
                f"look at {self.run.path / self.plan.site.kind} and at their slurmd"
            )
        answers = [meeting.heard_of(rank)["answer"] for rank in range(nodes)]
        if found := checkin.problems(answers):
            raise Fault("; ".join(found))
        chosen = checkin.agree_on_ports(plans.port_seed(self.plan, number), answers)
        self.run.record(
            "checked_in",
            attempt=number,
            seconds=round(time.monotonic() - started, 2),
            addresses={each["node"]: each["address"] for each in answers},
            ports=chosen.as_dict(),
        )
        return chosen.first

    def await_all(self, state: str, attempt: int, deadline: float) -> None:
        """Wait until no node is silent, the deadline has passed, or the scheduler ends the job."""
        limit = time.monotonic() + deadline
        while self.meeting.silent(state, attempt) and time.monotonic() < limit and not self.is_told_to_end:
            self.meeting.give_sign()
            time.sleep(POLL_SECONDS)

    def settle(self, attempt: AttemptDir, found: Outcome, code: int) -> None:
        """Write down how an attempt ended and what follows."""
        state = STATES.get(found.kind, "failed")
        fields = {"attempt": attempt.number, "kind": found.kind, "action": found.action, "message": found.reason}
        self.run.record("decided", **fields)
        write_atomically(attempt.outcome, json.dumps({"state": state, "exit": code, **fields}) + "\n")
        words = f"attempt {attempt.number}: {found.kind}: {found.reason} -> {found.action}"
        print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)

    def requeue(self, attempt: AttemptDir) -> None:
        """Queue the job again; where nobody does, submit a new one."""
        try:
            self.here.requeue()
        except Fault as fault:
            self.run.record("requeue_refused", attempt=attempt.number, job=self.here.job, message=str(fault))
            submission.submit(self.plan, self.newest_checkpoint(), by="the job itself")

    def asked(self, attempt: AttemptDir) -> str | None:
        """Who asked the attempt to end."""
        request = read(attempt.stop_request)
        if request is not None and "by" not in request:
            return "person"
        if self.is_told_to_end:
            return "signal"
        return request["by"] if request else None

    def failed_stage(self, attempt: int) -> int | None:
        """Exit code of the last stage of an attempt that failed by itself, on whatever node."""
        ends = [e for e in self.run.events() if e["event"] == "stage_end" and e["attempt"] == attempt]
        codes = [event["exit"] for event in ends if isinstance(event["exit"], int) and event["exit"] != 0]
        return codes[-1] if codes else None

    def mind_the_end(self, attempt: AttemptDir) -> None:
        """Ask for a checkpoint when the scheduler warns us or the allocation is about to end."""
        self.meeting.give_sign()
        warned = signal.SIGUSR2 in self.signals
        if time.monotonic() < self.next_look and not warned:
            return
        self.next_look = time.monotonic() + LOOK_SECONDS
        end = self.here.end()
        left = end - time.time() if end else float("inf")
        needed, why = lead_seconds(self.run, self.plan.site.life)
        if warned:
            self.signals.remove(signal.SIGUSR2)
            if left > needed + EARLY_SECONDS and not attempt.stop_request.exists():
                self.ask_to_stop(attempt, "warning", "SIGUSR2 from the scheduler")
        if left < needed and not attempt.stop_request.exists():
            words = f"{left:.0f} s are left of the allocation, {needed:.0f} s are needed to save ({why})"
            self.ask_to_stop(attempt, "time limit", words)
        elif left < min(LAST_CALL_SECONDS, needed / 2):
            self.node.terminate()

    def ask_to_stop(self, attempt: AttemptDir, by: str, why: str) -> None:
        request = {"save": True, "by": by, "time": round(time.time(), 3)}
        write_atomically(attempt.stop_request, json.dumps(request) + "\n")
        self.run.record("asked_to_stop", attempt=attempt.number, by=by, message=why)

    # --- every rank ---

    def follow(self) -> int:
        """On the other ranks: do what rank 0 says until it says leave."""
        done: dict | None = None
        while True:
            order = self.meeting.ordered()
            if order is None or order == done:
                if self.is_told_to_end or self.meeting.lead_is_lost():
                    return 0
                time.sleep(POLL_SECONDS)
                continue
            if order["do"] == "leave":
                return 0
            number = order["attempt"]
            if order["do"] == "answer":
                self.meeting.report(
                    "answered", number, answer=checkin.answer(self.plan, self.meeting.name, self.here.rank)
                )
            else:
                code, message = self.run_node(self.run.attempt(number), order["ports"])
                self.meeting.report("ended", number, exit=code, message=message)
            done = order

    def run_node(self, attempt: AttemptDir, first_port: int) -> tuple[int, str]:
        """Run this node's part of an attempt to its end, and everything that ends an attempt early.

        Returns:
            Exit code (negative: killed by that signal) and last words.
        """
        rank, env = self.here.rank, os.environ | {"ATLASRL_JOB": self.here.job}
        if not self.plan.site.shares_host:  # there each node has a block of its own
            env |= {"ATLASRL_PORTS": str(first_port)}
        attempt.logs.mkdir(parents=True, exist_ok=True)
        self.node = processes.spawn(
            [self.plan.python, "-m", "atlasrl.node", str(self.run.path), str(attempt.number), str(rank)],
            env=env,
            log=attempt.logs / f"node{rank}.log",
            death_signal=signal.SIGTERM,
        )
        told = False
        while self.node.poll() is None:
            if not told and (self.is_told_to_end or (rank and self.meeting.lead_is_lost())):
                self.node.terminate()
                told = True
            if rank == 0:
                self.mind_the_end(attempt)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.node.wait(POLL_SECONDS)
        processes.end_descendants(patience=2)
        raycluster.remove_temp(self.plan.ray_temp(attempt.number, rank))  # a node that was killed could not
        said = read(attempt.node(rank)) or {}
        code = self.node.returncode
        if said.get("state") in ("ended", "failed"):
            return code, said["message"]
        words = (
            f"node{rank} ({self.meeting.name}): its process ended with {code} in state {said.get('state', 'starting')}"
        )
        said |= {"host": self.meeting.name, "state": "failed", "message": words}
        with contextlib.suppress(OSError):  # the disk may be full
            write_atomically(attempt.node(rank), json.dumps(said) + "\n")
        return code, words


def lead_seconds(run: RunDir, life: Life) -> tuple[float, str]:
    """How long before a planned end a run must begin to save, from its own steps and saves, and why."""
    steps = [line["data"] for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]
    saves = [event["seconds"] for event in run.events() if event["event"] == "checkpoint"]
    return outcome.seconds_to_save(steps[-20:], saves[-20:], life)


class JobTask:
    """What submitit runs once per node. Holds only words and numbers, so that a pickle of any age means the same."""

    def __init__(self, run: str, attempt: int, token: str):
        self.run, self.attempt, self.token = run, attempt, token

    def __call__(self) -> int:
        try:
            code = Supervisor(RunDir(self.run), self.token, allocation.here()).supervise(self.attempt)
        except Fault as fault:  # a damaged journal or plan
            print(f"error: {fault}", flush=True)
            code = fault.exit_code
        sys.stdout.flush()
        raise SystemExit(code)  # no Exception: submitit would write a result, and the requeued job would find it
