"""Groups of a sync rollout: every rank in one, and all members of a group agree about it."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlasrl.errors import UsageFault
from atlasrl.rollout_groups import group_of

NODES = [f"10.0.0.{rank // 8}" for rank in range(256)]


def all_groups(addresses, tensor, expert):
    return [group_of(rank, addresses, tensor, expert, 29444) for rank in range(len(addresses))]


def test_256_ranks_of_tensor_8_and_expert_64_are_32_groups_of_8():
    groups = all_groups(NODES, 8, 64)
    assert {group.master_port for group in groups} == set(range(29445, 29477))
    ten = groups[10]
    assert (ten.group, ten.data_rank, ten.members[0], ten.master_address) == (2, 1, 2, "10.0.0.0")
    last = groups[255]
    assert (last.group, last.data_rank, last.members[0], last.master_address) == (31, 7, 199, "10.0.0.24")
    assert last.environment["VLLM_DP_SIZE"] == "8"


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.integers(1, 5))
def test_members_agree_and_divide_the_world_as_the_mesh_does(tensor, data, replicas):
    """The reference is the array construction: [replica, data, tensor] -> rows over the data axis."""
    world = tensor * data * replicas
    groups = all_groups([str(rank) for rank in range(world)], tensor, tensor * data)
    mesh = numpy.arange(world).reshape(-1, data, 1, tensor).transpose(0, 3, 2, 1).reshape(-1, data)
    for row, members in enumerate(mesh.tolist()):
        for data_rank, rank in enumerate(members):
            found = groups[rank]
            assert (found.group, list(found.members), found.data_rank) == (row, members, data_rank)
            assert found.master_address == str(members[0])


@pytest.mark.parametrize(
    "rank, tensor, expert, port, says",
    [
        (256, 8, 64, 29444, "rank 256"),
        (-1, 8, 64, 29444, "rank -1"),
        (0, 8, 60, 29444, "no multiple of rollout.tensor"),
        (0, 8, 48, 29444, "no multiple of rollout.expert"),
        (0, 8, 64, 65520, "choose another base"),
        (0, 0, 64, 29444, "no multiple of rollout.tensor"),
    ],
)
def test_what_cannot_be_grouped_is_refused(rank, tensor, expert, port, says):
    with pytest.raises(UsageFault, match=says):
        group_of(rank, NODES, tensor, expert, port)
