"""FSDP2 workers: what the model says of every worker's tensors is what real workers hold."""

import math

import pytest
from fsdp2_workers import TINY, predicted, run_workers

from atlasrl.memory import architecture, sharded
from atlasrl.memory.architecture import Weight
from atlasrl.memory.measured import exact, growth


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(8,), (7, 5), (3, 8), (5, 1), (2, 2), (1, 9)])
def test_shards_of_a_weight_make_it_whole(world, shape):
    weight = Weight("w", shape, "tensor")
    parts = [sharded.shard_rows(weight, world, rank) for rank in range(world)]
    assert sum(parts) == math.prod(shape)
    assert parts == sorted(parts, reverse=True)


WORLD = 3  # divides none of the sizes, so that shards are uneven
CONFIG = {**TINY, "vocab_size": 16385}
BATCH = sharded.Batch(prompt=16, response=48, rows=4, scored_rows=8)


@pytest.fixture(scope="module")
def workers(tmp_path_factory) -> list[list[dict]]:
    """What real workers of verl hold and measure."""
    folder = tmp_path_factory.mktemp("workers")
    return run_workers(folder, CONFIG, BATCH, world=WORLD, answers=8, steps=2)


@pytest.mark.verl
def test_every_workers_tensors_are_predicted_to_the_byte(workers):
    for rank, records in enumerate(workers):
        assert exact(records) == predicted(CONFIG, BATCH, WORLD, rank)


@pytest.mark.verl
def test_resident_memory_grows_as_predicted(workers):
    """Within 15 %, from the second step on: the first loads libraries and makes the optimizer state."""
    a = architecture.from_config(CONFIG)
    for records in workers:
        assert growth(records, "log_prob")[1] == pytest.approx(sharded.score_growth(a, BATCH).total, rel=0.15)
        assert growth(records, "update")[1] == pytest.approx(sharded.update_growth(a, BATCH, WORLD).total, rel=0.15)


@pytest.mark.verl
def test_the_comparison_can_fail(workers):
    """Negative control: a prediction for another vocabulary is found wrong in everything that depends on it."""
    wrong = predicted({**CONFIG, "vocab_size": CONFIG["vocab_size"] + 3}, BATCH, WORLD, 0)
    differing = {kind for kind, size in wrong.items() if size != exact(workers[0])[kind]}
    assert differing == {"weights", "gradients", "optimizer", "update_logits", "score_logits"}
