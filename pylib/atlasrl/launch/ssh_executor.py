"""A submitit executor for hosts over ssh. `python -m atlasrl.launch.ssh_executor FOLDER` is a task on a host.

Registered as a submitit plug-in by the package's entry points; a clone that is not installed registers it here.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from submitit.core import core, job_environment, plugins, submission

from atlasrl.launch import ssh
from atlasrl.plan import Plan


class SshJob(core.Job):
    """Only a name for the tasks; the run directory tells how they fare."""

    def done(self, force_check: bool = False) -> bool:
        return self.paths.result_pickle.exists()


class SshJobEnvironment(job_environment.JobEnvironment):
    """What submitit asks about a task."""

    _env = {  # noqa: RUF012 (submitit declares it so)
        "job_id": "ATLASRL_SSH_JOB",
        "global_rank": "ATLASRL_SSH_RANK",
        "node": "ATLASRL_SSH_RANK",
        "local_rank": "ATLASRL_SSH_LOCAL_RANK",  # never set: one task per host
    }

    @property
    def hostnames(self) -> list[str]:
        return os.environ["ATLASRL_SSH_HOSTS"].split(",")

    @property
    def num_tasks(self) -> int:
        return len(self.hostnames)

    num_nodes = num_tasks


class SshExecutor(core.PicklingExecutor):
    """Starts one task on each of the given hosts."""

    job_class = SshJob

    def __init__(self, plan: Plan, hosts: list[str], folder: Path):
        super().__init__(folder)
        self.plan, self.hosts = plan, hosts

    @classmethod
    def affinity(cls) -> int:
        return -1  # never chosen by submitit's AutoExecutor: it needs a list of hosts

    def _submit_command(self, command: str) -> SshJob:
        job = f"ssh-{secrets.token_hex(4)}"
        ssh.start_tasks(self.plan, job, self.hosts)
        return SshJob(folder=self.folder, job_id=job, tasks=list(range(len(self.hosts))))

    def _num_tasks(self) -> int:
        return len(self.hosts)

    def _internal_update_parameters(self, **parameters) -> None:
        raise ValueError("SshExecutor has no parameters; the site file describes the hosts")

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError  # _submit_command needs no file

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError


def main() -> None:
    if "ssh" not in plugins.get_job_environments():
        plugins._get_plugins()[1].append(SshJobEnvironment())
        plugins.get_job_environments.cache_clear()
    submission.process_job(sys.argv[1])


if __name__ == "__main__":
    main()
