"""A damaged journal and a full disk: clear words, nothing lost."""

import json
from pathlib import Path

import pytest

from jobs import command, train

pytestmark = pytest.mark.cluster


def test_damage_of_the_journal_is_survived_or_named(cluster):
    job = train(cluster, "damaged", nodes=1, steps=40, environment={"LIGHT_STEP_SECONDS": "0.2"})
    job.wait_for_checkpoint(2)
    with job.run.journal.open("a") as journal:
        journal.write('{"time": 1, "event": "half')
    job.wait(lambda: job.events("torn_line"), 120, "the torn line to be set aside")
    command(cluster, "stop", "damaged", "--save")
    job.wait_for_end()

    intact = job.run.journal.read_text()
    lines = intact.splitlines(keepends=True)
    job.run.journal.write_text("".join([*lines[:5], "tampered\n", *lines[5:]]))
    for verb in ("status", "resume"):
        answer = command(cluster, verb, "damaged", check=False)
        assert answer.returncode == 1
        assert f"{job.run.journal}:6 is not a JSON object" in answer.stderr
        assert len(answer.stderr.strip().splitlines()) == 1
    assert job.run.journal.read_text().count("\n") == len(lines) + 1, "a damaged journal is not written to"
    job.run.journal.write_text(intact)
    assert "continues from step" in command(cluster, "resume", "damaged", "--explain").stdout


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_intact(cluster):
    """The run lives on a small filesystem that fills up while it trains."""
    if cluster.facts["mode"] != "namespaces":
        pytest.skip("mounting needs namespaces")
    with cluster.small_disk(megabytes=160) as small:
        job = train(
            cluster,
            "full",
            nodes=1,
            steps=60,
            runs=small,
            environment={"LIGHT_STEP_SECONDS": "0.2", "LIGHT_CHECKPOINT_MB": "20"},
        )
        job.wait_for_checkpoint(2)
        other = small / "somebody else's"
        fill(other)
        last = job.wait_for_end()
        assert last["action"] == "stop" and "No space left on" in last["message"]
        complete = [json.loads(file.read_text())["step"] for file in job.run.checkpoints.glob("global_step_*/COMPLETE")]
        other.unlink()
        answer = command(cluster, "resume", str(job.run.path), "--explain")
        assert f"continues from step {max(complete)} " in answer.stdout


def fill(file: Path) -> None:
    """Write until nothing fits any more."""
    with file.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(bytes(2**20))
    with file.open("ab", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while True:
            stream.write(bytes(512))
