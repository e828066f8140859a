"""The life of a job on a real Slurm: whatever ends an attempt, the run goes on by itself, or says why not."""

import signal

import pytest

from jobs import command, train

pytestmark = pytest.mark.cluster


def find_process(cluster, node: str, words: str) -> int:
    """The host's pid of a process on a node, by its command line; in loopback mode all nodes are this host."""
    found = cluster.on(node, "pgrep", "-f", "--newest", words, check=False).stdout.split()
    assert found, f"no process like {words} on {node}"
    return int(found[0])


def kill(cluster, node: str, words: str, number: int = signal.SIGKILL) -> None:
    cluster.on(node, "kill", f"-{int(number)}", str(find_process(cluster, node, words)))


def test_faults_of_every_kind_are_survived_in_one_run(cluster):
    """Trainer killed, worker raylet killed, USR2, and a node without power: no step is lost beyond save_every."""
    job = train(
        cluster, "faults", nodes=2, steps=400, checkpoint__save_every=2, environment={"LIGHT_STEP_SECONDS": "0.2"}
    )

    job.wait_for_checkpoint(2)
    kill(cluster, job.events("allocated")[0]["nodes"][0], "light_trainer.py")
    assert job.wait_for_decision(1)["action"] == "restart"

    job.wait_for_step(max(job.steps()) + 4)
    kill(cluster, job.events("allocated")[0]["nodes"][1], "raylet/raylet")
    assert job.wait_for_decision(2)["action"] == "restart"

    job.wait_for_step(max(job.steps()) + 4)
    cluster.login("scancel", "--signal=USR2", job.id)
    assert job.wait_for_decision(3)["kind"] == "preemption"
    refused = command(cluster, "resume", "faults", check=False)
    assert refused.returncode == 1 and "is with the scheduler and continues the run by itself" in refused.stderr
    job.wait_for_requeue(4)

    job.wait_for_step(max(job.steps()) + 4)
    if cluster.facts["mode"] == "namespaces":
        lose_power(job, rank=1, attempt=4)

    command(cluster, "stop", "faults", "--save")
    assert job.wait_for_end()["kind"] == "stopped"
    assert [step for step in job.steps() if step == 1] == [1]
    assert repeated(job) <= 2
    print(job.story())


def lose_power(job, rank: int, attempt: int) -> None:
    """Switch off a node of an attempt, and wait until the next one trains without it."""
    victim = job.events("allocated")[-1]["nodes"][rank]
    job.cluster.power_off(victim)
    try:
        job.wait_for_requeue(attempt + 1)
        assert victim not in job.events("allocated")[-1]["nodes"]
        job.wait_for_step(max(job.steps()) + 4)
    finally:
        job.cluster.boot(victim)


def repeated(job) -> int:
    """The most steps that any restart did again."""
    steps = job.steps()
    return max((steps[i - 1] - steps[i] + 1 for i in range(1, len(steps)) if steps[i] <= steps[i - 1]), default=0)


def test_without_progress_the_third_attempt_is_the_last(cluster):
    job = train(
        cluster,
        "fruitless",
        nodes=1,
        steps=100,
        checkpoint__save_every=50,
        environment={"LIGHT_CRASH_AFTER": "2", "LIGHT_STEP_SECONDS": "0.1"},
    )
    last = job.wait_for_end()
    assert job.decisions() == [("crash", "restart"), ("crash", "restart"), ("no progress", "stop")]
    assert "3 attempts in a row" in last["message"] and "stage train failed with exit code -9" in last["message"]
    job.wait(lambda: job.cluster.job_state(job.id) == "FAILED", 120, "Slurm to call the job failed")


def test_a_cancelled_job_is_resumed_by_its_id_also_without_its_pickle(cluster):
    job = train(cluster, "cancelled", nodes=1, steps=60, environment={"LIGHT_STEP_SECONDS": "0.2"})
    job.wait_for_checkpoint(3)
    cluster.login("scancel", job.id)
    job.wait(lambda: job.cluster.job_state(job.id) == "CANCELLED", 120, "the end of the job")
    for pickle in (job.run.path / "slurm").glob("*.pkl"):
        pickle.unlink()
    answer = command(cluster, "resume", f"{job.id}_4")  # as an element of an array would be called
    assert "continues from step" in answer.stdout
    job.wait_for_step(max(job.steps()) + 2)
    command(cluster, "stop", "cancelled", "--save")
    assert repeated(job) <= 1


def test_the_time_limit_ends_nothing_twice_in_a_row(cluster):
    """Periodic checkpoints never come: only the one before the limit counts."""
    job = train(
        cluster,
        "limit",
        nodes=1,
        steps=300,
        checkpoint__save_every=1000,
        environment={"LIGHT_STEP_SECONDS": "0.5"},
        site={"slurm": {"time": 1}, "life": {"save_minutes": 0.45}},
    )
    for attempt in (1, 2):
        decided = job.wait_for_decision(attempt)
        assert (decided["kind"], decided["action"]) == ("time limit", "requeue"), job.story()
        job.wait_for_requeue(attempt + 1)
    job.wait_for_step(max(job.steps()) + 2)
    command(cluster, "stop", "limit", "--save")
    assert repeated(job) <= 1
    assert sorted(set(job.steps())) == list(range(1, max(job.steps()) + 1))


def test_the_loss_of_the_head_node_is_survived(cluster):
    if cluster.facts["mode"] != "namespaces":
        pytest.skip("loopback nodes share one machine")
    job = train(cluster, "headless", nodes=2, steps=400, environment={"LIGHT_STEP_SECONDS": "0.2"})
    job.wait_for_checkpoint(4)
    lose_power(job, rank=0, attempt=1)
    assert job.decisions()[0] == ("node failure", "leave"), "written by the next incarnation"
    command(cluster, "stop", "headless")
    assert repeated(job) <= 1


def test_a_node_set_down_by_the_administrator_is_survived(cluster):
    job = train(cluster, "maintenance", nodes=2, steps=400, environment={"LIGHT_STEP_SECONDS": "0.2"})
    job.wait_for_checkpoint(4)
    node = job.events("allocated")[0]["nodes"][1]
    cluster.login("scontrol", "update", f"nodename={node}", "state=down", "reason=memory")
    try:
        job.wait_for_requeue(2)
        job.wait_for_step(max(job.steps()) + 2)
        command(cluster, "stop", "maintenance")
    finally:
        cluster.login("scontrol", "update", f"nodename={node}", "state=resume", check=False)  # it may be back already
    assert repeated(job) <= 2, "the periodic checkpoint is all that counts here"


@pytest.mark.nightly
def test_where_slurm_does_not_requeue_the_job_submits_itself_again(cluster):
    site = {"slurm": {"extra": ["--no-requeue"]}}
    job = train(cluster, "again", nodes=1, steps=400, site=site, environment={"LIGHT_STEP_SECONDS": "0.2"})
    job.wait_for_checkpoint(2)
    cluster.login("scancel", "--signal=USR2", job.id)
    submitted = job.wait(lambda: job.events("submitted")[1:], 600, "the second job")[0]
    assert submitted["by"] == "the job itself" and submitted["job"] != job.id
    assert "does not requeue" in job.events("requeue_refused")[0]["message"]
    job.wait_for_step(max(job.steps()) + 2)
    command(cluster, "stop", job.id)
    assert repeated(job) <= 1
