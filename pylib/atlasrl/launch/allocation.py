"""The nodes of a job, as one of its tasks sees them.

The head is rank 0, by the scheduler's word (SLURM_PROCID); addresses and host names decide nothing (ray#58875).
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field

from atlasrl.errors import Fault
from atlasrl.launch import hostlist, squeue

END_REFRESH_SECONDS = 60  # administrators and users change time limits of running jobs


@dataclass
class SlurmAllocation:
    """One incarnation of a Slurm job: a requeue keeps the id and counts `restarts` up."""

    job: str
    restarts: int
    rank: int
    names: list[str]
    _end: tuple[float, float | None] = field(default=(0.0, None), repr=False)  # when it was asked for, and the answer

    @classmethod
    def here(cls) -> SlurmAllocation:
        """Read the environment that srun gives to a task."""
        env = os.environ
        return cls(
            job=env["SLURM_JOB_ID"],
            restarts=int(env.get("SLURM_RESTART_COUNT", 0)),
            rank=int(env["SLURM_PROCID"]),
            names=hostlist.expand(env["SLURM_JOB_NODELIST"]),
        )

    @property
    def incarnation(self) -> str:
        return f"{self.job}.{self.restarts}"

    @property
    def is_fresh(self) -> bool:
        """Whether a person submitted this incarnation, in contrast to a requeue."""
        return self.restarts == 0

    def end(self) -> float | None:
        """When Slurm will end the job (epoch seconds); None: no limit, or Slurm does not say just now."""
        asked, known = self._end
        if time.monotonic() - asked > END_REFRESH_SECONDS or asked == 0:
            try:
                state = squeue.state(self.job)
                known = state.end if state else None
            except Fault as fault:
                print(f"the end of the allocation is not known: {fault}", flush=True)
            self._end = (time.monotonic(), known)
        return known

    def requeue(self) -> None:
        """Give the nodes back and queue the job again under the same id; Slurm ends all tasks, this one too.

        Raises:
            Fault: Slurm would not; the message says why.
        """
        answer = subprocess.run(
            ["scontrol", "requeue", self.job], capture_output=True, text=True, timeout=120, check=False
        )
        if answer.returncode:
            raise Fault(f"Slurm does not requeue job {self.job}: {answer.stderr.strip() or answer.stdout.strip()}")


@dataclass
class SshAllocation:
    """The hosts of a job without a scheduler."""

    job: str
    rank: int
    names: list[str]
    is_fresh: bool = True

    @classmethod
    def here(cls) -> SshAllocation:
        """Read the environment that `launch.ssh` gives to a task."""
        env = os.environ
        return cls(env["ATLASRL_SSH_JOB"], int(env["ATLASRL_SSH_RANK"]), env["ATLASRL_SSH_HOSTS"].split(","))

    @property
    def incarnation(self) -> str:
        return self.job

    def end(self) -> None:
        """Nobody takes the hosts away."""

    def requeue(self) -> None:
        """Raises Fault: there is no queue; a new job takes the hosts that still answer."""
        raise Fault("there is no scheduler to queue the job again")


def here() -> SlurmAllocation | SshAllocation:
    """The allocation of this task."""
    return (SshAllocation if os.environ.get("SUBMITIT_EXECUTOR") == "ssh" else SlurmAllocation).here()
