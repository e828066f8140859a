"""Job states from squeue and sacct, as the real programs print them; the programs here are stand-ins on PATH."""

import os
from pathlib import Path

import pytest

from atlasrl.errors import Fault
from atlasrl.launch import squeue


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put programs on PATH that print what they are told."""

    def program(name: str, stdout: str = "", stderr: str = "", code: int = 0):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncat <<'X'\n{stdout}\nX\necho '{stderr}' >&2\nexit {code}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(squeue, "PATIENCE_SECONDS", 0.5)
    return program


@pytest.mark.parametrize(
    ("line", "state", "alive"),
    [
        ("123|RUNNING|node[01-32]|2026-11-30T12:00:00|None", "RUNNING", True),
        ("123|PENDING||N/A|BeginTime", "PENDING", True),
        ("123|COMPLETING|node01|2026-11-30T12:00:00|NonZeroExitCode", "COMPLETING", True),
        ("123|CANCELLED by 1000|node01|2026-11-30T12:00:00|None", "CANCELLED", False),
        ("123|CANCELLED+|None assigned|Unknown|None", "CANCELLED", False),
        ("123|NODE_FAIL|node01|2026-11-30T12:00:00|NodeDown", "NODE_FAIL", False),
        ("123|TIMEOUT|node01|2026-11-30T12:00:00|TimeLimit", "TIMEOUT", False),
        ("123|PENDING||N/A|(ReqNodeNotAvail|UnavailableNodes:cs[100,101])", "PENDING", True),
    ],
)
def test_states_are_read(line, state, alive):
    found = squeue.parse(line)
    assert (found.state, found.is_alive) == (state, alive)


def test_the_planned_end_is_epoch_seconds(monkeypatch):
    found = squeue.parse("1|RUNNING|n1|2026-11-30T12:00:30|None")
    assert found.end == squeue.parse("1|RUNNING|n1|2026-11-30T12:00:00|None").end + 30
    assert squeue.parse("1|PENDING||N/A|None").end is None


def test_steps_and_older_entries_of_a_requeued_job_do_not_count(slurm):
    slurm("squeue", stderr="slurm_load_jobs error: Invalid job id specified", code=1)
    slurm("scontrol", "AccountingStorageType   = accounting_storage/slurmdbd")
    slurm(
        "sacct",
        "7|NODE_FAIL|node01|2026-11-30T11:00:00|None\n7.batch|CANCELLED|node01|2026-11-30T11:00:00|\n"
        "7|COMPLETED|node02|2026-11-30T12:00:00|None\n7.0|FAILED|node02|2026-11-30T12:00:00|",
    )
    assert squeue.state("7").state == "COMPLETED"


def test_a_purged_job_without_accounting_is_unknown_not_an_error(slurm):
    slurm("squeue", stderr="slurm_load_jobs error: Invalid job id specified", code=1)
    slurm("scontrol", "AccountingStorageType   = accounting_storage/none")
    assert squeue.state("7") is None


def test_a_controller_that_is_away_is_a_fault_not_an_ended_job(slurm):
    slurm("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)", code=1)
    with pytest.raises(Fault, match="Unable to contact slurm controller"):
        squeue.state("7")


def test_no_slurm_client_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Fault, match="squeue is not on this machine"):
        squeue.state("7")


@pytest.mark.parametrize("job", ["7; rm -rf /", "", "--help", "12_", "abc"])
def test_what_is_no_job_id_never_reaches_a_program(job, slurm, tmp_path):
    slurm("squeue", "x")
    with pytest.raises(Fault, match="is no Slurm job id"):
        squeue.state(job)


def test_array_ids_are_asked_for_as_they_are(slurm, tmp_path):
    path = Path(tmp_path / "squeue")
    path.write_text(
        '#!/bin/sh\nfor word; do case $word in --jobs=*) echo "${word#--jobs=}|RUNNING|n1|N/A|None";; esac; done\n'
    )
    path.chmod(0o755)
    assert squeue.state("123_4").id == "123_4"
