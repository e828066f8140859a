"""verl itself across the nodes of a Slurm job."""

import json

import pytest

from jobs import site_file, submit

pytestmark = pytest.mark.cluster


@pytest.mark.nightly
def test_the_tiny_recipe_trains_on_four_nodes_as_one_run(cluster):
    """Two replicas of two workers that share the experts, one worker a node."""
    options = ("--set", "steps=3", "--set", "checkpoint.save_every=3")
    job = submit(cluster, "tiny", "verl", 4, site_file(cluster, "verl", False, {}), *options)
    assert job.wait_for_end(900)["kind"] == "done", job.story()
    assert job.steps() == [0, 1, 2, 3], "a validation before the first step"
    up = job.events("ray_up")[-1]
    assert set(up["resources"]) == {"node0", "node1", "node2", "node3"}
    saved = json.loads((job.run.checkpoints / "global_step_3" / "COMPLETE").read_text())
    assert (saved["world_size"], saved["layout"]["expert"]) == (4, 2)
    writers = {name.split("_")[3] for name in saved["files"] if name.endswith(".distcp")}
    assert writers == {"0", "1", "2", "3"}, "one actor worker a node"
    assert scalars(job.run.tensorboard, "critic/score/mean") == [1, 2, 3]
    assert (job.run.export / "config.json").exists()


def scalars(folder, tag: str) -> list[int]:
    """Steps of a tag, in the order of the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [point.step for point in events.Scalars(tag)]
