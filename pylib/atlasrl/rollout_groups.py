"""Expert-parallel groups of a sync (SPMD) rollout: which rank generates with which, and where they meet.

With verl's sync rollout every rank holds its own vLLM engine; the engines of one replica share the experts over
TP x DP = EP ranks and learn of each other by variables alone. Sources: verl e2d45b00e, recipe/r1_ascend; vllm-ascend
v0.10.0rc1 examples/offline_data_parallel.py (names of the variables). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atlasrl.errors import UsageFault

LAST_PORT = 65535


@dataclass(frozen=True)
class RolloutGroup:
    """The data-parallel group of one rank: same place in its tensor group, same replica, every data rank once."""

    rank: int
    group: int
    """Number of the group among all; each has a port of its own."""
    members: tuple[int, ...]
    """Ranks in the order of their data ranks."""
    data_rank: int
    master_address: str
    """Of the node of the first member."""
    master_port: int

    @property
    def environment(self) -> dict[str, str]:
        """What vLLM reads, before its engine is made."""
        return {
            "VLLM_DP_RANK": str(self.data_rank),
            "VLLM_DP_SIZE": str(len(self.members)),
            "VLLM_DP_MASTER_IP": self.master_address,
            "VLLM_DP_MASTER_PORT": str(self.master_port),
            "VLLM_PORT": str(self.master_port),
        }


def group_of(rank: int, addresses: Sequence[str], tensor: int, expert: int, base_port: int) -> RolloutGroup:
    """The group of `rank`; `addresses` has the address of every rank's node, in the order of the ranks.

    >>> group_of(10, ["10.0.0.1"] * 64, tensor=8, expert=64, base_port=29444).members[:3]
    (2, 10, 18)

    Raises:
        UsageFault: sizes that do not divide, a rank outside of the world, or ports beyond 65535.
    """
    world = len(addresses)
    if not 0 <= rank < world:
        raise UsageFault(f"rank {rank} is not among the {world} ranks; give one address for each rank")
    if min(tensor, expert) < 1 or expert % tensor:
        raise UsageFault(f"rollout.expert {expert} is no multiple of rollout.tensor {tensor}; EP = TP x DP")
    if world % expert:
        raise UsageFault(f"{world} ranks are no multiple of rollout.expert {expert}; change it or the number of nodes")
    replica, within = divmod(rank, expert)
    group = replica * tensor + within % tensor
    groups = world // expert * tensor
    if base_port < 1024 or base_port + groups > LAST_PORT:
        raise UsageFault(f"{groups} groups take the ports {base_port + 1} to {base_port + groups}; choose another base")
    first = replica * expert + within % tensor
    return RolloutGroup(
        rank=rank,
        group=group,
        members=tuple(range(first, first + expert, tensor)),
        data_rank=within // tensor,
        master_address=addresses[first],
        master_port=base_port + 1 + group,
    )
