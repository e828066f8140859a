"""Names and options of an optimizer's state, from the split that saved it to the split that loads it."""

from __future__ import annotations

import pytest

from atlasrl.errors import Fault
from atlasrl.trainer import other_layout

pytestmark = pytest.mark.verl

NORMS, MATRICES = ({"wd_mult": mult, "lr_mult": 1.0, "is_decoupled_lr": False} for mult in (0.0, 1.0))
SAVED = {
    "chained_0.optimizer.state.exp_avg.a",
    "chained_1.optimizer.state.exp_avg.experts",
    "rng_state/shard_0.0_1.1",
}


def part(*groups, **names):
    return {"optimizer": {"param_groups": list(groups)}, "param_state": names, "param_state_sharding_type": "t"}


def tensor(key):
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor.from_rank_offsets(key, torch.zeros(2))


def test_tensors_of_one_optimizer_are_found_in_a_chain_and_the_other_way_round():
    state = {0: {"exp_avg": tensor("optimizer.state.exp_avg.a")}, 1: [tensor("optimizer.state.exp_avg.experts"), "b"]}
    other_layout.rename([state], SAVED)
    assert state[0]["exp_avg"].key == "chained_0.optimizer.state.exp_avg.a"
    assert state[1][0].key == "chained_1.optimizer.state.exp_avg.experts"
    other_layout.rename([state], {"optimizer.state.exp_avg.a", "optimizer.state.exp_avg.experts"})
    assert state[0]["exp_avg"].key == "optimizer.state.exp_avg.a"


def test_a_tensor_that_was_not_saved_is_named():
    with pytest.raises(Fault, match=r"holds no optimizer\.state\.exp_avg\.b"):
        other_layout.rename([{"b": tensor("chained_0.optimizer.state.exp_avg.b")}], SAVED)


def test_the_plain_optimizer_is_refused():
    with pytest.raises(Fault, match="only the distributed optimizer"):
        other_layout.rename([None], SAVED)


def test_options_come_from_the_saved_group_of_the_same_kind():
    saved = {0: part(MATRICES | {"step": 4}, NORMS | {"step": 4}), 1: part(MATRICES | {"step": 4})}
    own = part(NORMS | {"is_expert_parallel": False}, MATRICES | {"is_expert_parallel": False})
    whole = other_layout.assembled(own, {0: "tensors"}, saved)
    groups = whole["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["step"]) for group in groups] == [(0.0, 4), (1.0, 4)]
    assert whole["param_state"] == "tensors"

    chain = {0: own, 1: part(MATRICES | {"is_expert_parallel": True})}
    linked = other_layout.assembled(chain, {0: "dense", 1: "routed"}, whole)
    assert [state["param_state"] for state in linked.values()] == ["dense", "routed"]
    assert linked[1]["optimizer"]["param_groups"][0] | MATRICES == linked[1]["optimizer"]["param_groups"][0]
    assert linked[1]["optimizer"]["param_groups"][0]["is_expert_parallel"]


def test_a_group_that_nobody_saved_is_refused():
    with pytest.raises(Fault, match=r"no parameter group with wd_mult 0\.0"):
        other_layout.assembled(part(NORMS), {0: {}}, part(MATRICES))
