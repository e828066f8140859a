"""verl itself across the nodes of a Slurm job."""

import json

import pytest

from jobs import train

pytestmark = pytest.mark.cluster


@pytest.mark.nightly
def test_four_nodes_train_one_run(cluster):
    job = train(cluster, "verl", nodes=4, light=False, steps=3)
    assert job.wait_for_end()["kind"] == "done"
    assert job.steps() == [1, 2, 3]
    up = job.events("ray_up")[-1]
    assert set(up["resources"]) == {"node0", "node1", "node2", "node3"}
    checkpoint = json.loads((job.run.checkpoints / "global_step_3" / "COMPLETE").read_text())
    shards = [name for name in checkpoint["files"] if name.startswith("actor/model_world_size_4_rank_")]
    assert len(shards) == 4, "one actor worker a node"
    assert scalars(job.run.tensorboard, "critic/score/mean") == [1, 2, 3]
    assert (job.run.export / "config.json").exists()


def scalars(folder, tag: str) -> list[int]:
    """Steps of a tag, in the order of the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [point.step for point in events.Scalars(tag)]
