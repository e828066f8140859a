"""FSDP2 workers: what the model says of every worker's tensors is what real workers hold."""

import math

import pytest
from measured import TINY, exact, growth, predicted, run_workers

from atlasrl.memory import architecture, sharded
from atlasrl.memory.architecture import Weight


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shape", [(8,), (7, 5), (3, 8), (5, 1), (2, 2), (1, 9)])
def test_shards_of_a_weight_make_it_whole(world, shape):
    weight = Weight("w", shape, "tensor")
    parts = [sharded.shard_rows(weight, world, rank) for rank in range(world)]
    assert sum(parts) == math.prod(shape)
    assert parts == sorted(parts, reverse=True)


@pytest.mark.verl
@pytest.mark.parametrize("world", [2, 3])
def test_every_workers_tensors_are_predicted_to_the_byte(tmp_path, world):
    """Three workers divide none of the sizes: shards are uneven. Resident growth within 15 %, where tensors rule it."""
    config = {**TINY, "vocab_size": 16384 + world - 2}
    batch = sharded.Batch(prompt=16, response=48, rows=4, scored_rows=8)
    a = architecture.from_config(config)
    records = run_workers(tmp_path / "w", config, batch, world=world, answers=8, steps=2)
    for rank, own in enumerate(records):
        assert exact(own) == predicted(config, batch, world, rank)
    first = records[0]
    assert growth(first, "log_prob")[1] == pytest.approx(sharded.score_growth(a, batch).total, rel=0.15)
    assert growth(first, "update")[1] == pytest.approx(sharded.update_growth(a, batch, world).total, rel=0.15)


@pytest.mark.verl
def test_the_comparison_can_fail(tmp_path):
    """Negative control: a prediction for another vocabulary is found wrong by the same comparison."""
    batch = sharded.Batch(prompt=4, response=4, rows=2, scored_rows=2)
    (own,) = run_workers(tmp_path / "w", TINY, batch, world=1, answers=2, steps=1)
    assert exact(own) == predicted(TINY, batch, 1, 0)
    other = {**TINY, "vocab_size": TINY["vocab_size"] + 1}
    wrong = {kind for kind, size in predicted(other, batch, 1, 0).items() if size != exact(own)[kind]}
    assert wrong == {"weights", "gradients", "optimizer", "update_logits", "score_logits"}
