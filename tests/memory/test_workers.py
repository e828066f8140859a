"""Workers of both backends: what is predicted of every worker's tensors is what real workers hold."""

import dataclasses
import math

import pytest
from verl_workers import run_workers

from atlasrl.memory import architecture, fsdp2, measured
from atlasrl.memory.architecture import Weight
from atlasrl.memory.megatron import Buffer


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(8,), (7, 5), (3, 8), (5, 1), (2, 2), (1, 9)])
def test_shards_of_a_weight_make_it_whole(world, shape):
    weight = Weight("w", shape, "tensor")
    parts = [fsdp2.shard_rows(weight, world, rank) for rank in range(world)]
    assert sum(parts) == math.prod(shape)
    assert parts == sorted(parts, reverse=True)


def test_a_parameter_that_two_replicas_share_has_a_step_count_on_both():
    buffer = Buffer(places=((0, 100), (128, 256)), length=256, replicas=2)
    assert [buffer.optimizer_bytes(replica) for replica in (0, 1)] == [4 * (2 * 100 + 1), 4 * (2 * 128 + 1)]
    across = Buffer(places=((0, 200),), length=256, replicas=2)
    assert [across.optimizer_bytes(replica) for replica in (0, 1)] == [4 * (2 * 128 + 1), 4 * (2 * 72 + 1)]


CASES = {
    # three workers divide none of the sizes, so that shards are uneven
    "fsdp2": {"backend": "fsdp2", "world": 3, "vocabulary": 16385},
    # 16383 rows of 64 make a buffer that ends within a bucket
    "megatron": {"backend": "megatron", "world": 2, "vocabulary": 16383, "parallel__expert": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("backend", CASES)
def test_tensors_are_predicted_to_the_byte_and_growth_within_15_percent(tmp_path, backend):
    """From the second step on: the first loads libraries and makes the optimizer's state."""
    recipe, records = run_workers(tmp_path, steps=2, **CASES[backend])
    a = architecture.read(tmp_path / "assets" / "model")
    for worker in measured.compare(recipe, a, records):
        assert all(found == predicted for found, predicted in worker.tensors.values()), worker.tensors
        assert {growth.phase for growth in worker.growths} == {"log_prob", "update"}
        assert all(abs(growth.off) <= 0.15 for growth in worker.growths), worker.growths

    # Negative control: a prediction for another vocabulary is wrong in everything that depends on it.
    other = next(measured.compare(recipe, dataclasses.replace(a, vocabulary=a.vocabulary + 3), records))
    differing = {kind for kind, (found, predicted) in other.tensors.items() if found != predicted}
    assert differing == {"weights", "gradients", "optimizer", "update_logits", "score_logits"}
