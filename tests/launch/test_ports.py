"""The port plan: disjoint, below the ephemeral range, derived, proven free, moved when taken."""

import itertools
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlasrl.errors import Fault
from atlasrl.launch import ports

LINUX = (32768, 60999)


def used(plan: ports.PortPlan) -> list[int]:
    """Every port that Ray or HCCL may open under a plan."""
    single = [getattr(plan, name) for name in ports.COMPONENTS]
    ranges = [plan.hccl_sockets, plan.workers, (plan.hccl_base, plan.hccl_base + ports.HCCL_BASE - 1)]
    return single + [port for low, high in ranges for port in range(low, high + 1)]


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=20), st.sampled_from([1, 2, 3, 8, 32]))
def test_no_two_components_and_no_two_nodes_of_a_host_share_a_port(seed, slots):
    every = [used(ports.plan(seed, slot, slots, ephemeral=LINUX)) for slot in range(slots)]
    flat = list(itertools.chain.from_iterable(every))
    assert len(flat) == len(set(flat))
    assert min(flat) >= ports.LOWEST and max(flat) < LINUX[0]


@settings(deadline=None)  # 8 nodes have 5 blocks each on one host: 4 held ports always leave one
@given(st.text(max_size=20), st.sets(st.integers(10000, 32767), max_size=4), st.integers(1, 8))
def test_a_held_port_is_never_planned_and_moving_keeps_nodes_apart(seed, held, slots):
    def taken(port):
        return f"holder of {port}" if port in held else None

    plans = [ports.plan(seed, slot, slots, taken, LINUX) for slot in range(slots)]
    flat = [port for plan in plans for port in used(plan)]
    assert not held & set(flat)
    assert len(flat) == len(set(flat))
    for slot, plan in enumerate(plans):
        assert ("holder of" in plan.reason) == (plan.first != ports.plan(seed, slot, slots, ephemeral=LINUX).first)


def test_the_plan_depends_on_the_job_alone():
    assert ports.plan("77/1", ephemeral=LINUX) == ports.plan("77/1", ephemeral=LINUX)
    firsts = {ports.plan(f"{job}/1", ephemeral=LINUX).first for job in range(0, 10000, 100)}
    assert len(firsts) > 30, "job ids that are equal modulo 100 must not meet in a few blocks"


@pytest.mark.parametrize(
    ("ephemeral", "within"),
    [((20000, 60999), (10000, 19999)), ((1024, 60999), (61000, 65535)), ((9000, 65535), (1024, 8999))],
)
def test_other_ephemeral_ranges_are_respected(ephemeral, within):
    ports_used = used(ports.plan("1/1", ephemeral=ephemeral))
    assert within[0] <= min(ports_used) and max(ports_used) <= within[1]


def test_no_room_is_a_fault_with_the_sysctl_to_run():
    with pytest.raises(Fault, match=r"sysctl net\.ipv4\.ip_local_port_range"):
        ports.plan("1/1", ephemeral=(1024, 65535))


def test_everything_taken_names_a_holder():
    with pytest.raises(Fault, match=r"no block of 512 free ports.*is held by sshd"):
        ports.plan("1/1", taken=lambda port: "sshd", ephemeral=LINUX)


def test_two_jobs_on_one_host_never_get_the_same_block():
    with ports.take("same job/1") as first, ports.take("same job/1") as second:
        assert not set(used(first)) & set(used(second))
        assert f"{first.claim} is held by pid" in second.reason
    with ports.take("same job/1") as again:
        assert again.first == first.first, "the claim must end with the context"


def test_a_foreign_listener_moves_the_plan_and_is_named():
    with ports.take("foreign/1") as expected:  # whatever else this machine runs just now
        pass
    listener = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); "
        "print('up', flush=True); sys.stdin.read()"
    )
    foreign = subprocess.Popen(
        [sys.executable, "-c", listener, str(expected.object_manager)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert foreign.stdout.readline() == b"up\n"
        with ports.take("foreign/1") as moved:
            assert expected.object_manager not in used(moved)
            assert f"{expected.object_manager} is held by pid {foreign.pid} (" in moved.reason
        with (
            pytest.raises(Fault, match=f"port {expected.object_manager} of .* is held by pid {foreign.pid}"),
            ports.take("foreign/1", wanted=expected),
        ):
            pass
    finally:
        foreign.communicate()


def test_an_agreed_plan_is_claimed():
    agreed = ports.plan("agreed/1", taken=lambda port: None if _free(port) else "someone")
    with ports.take("agreed/1", wanted=agreed) as mine:
        assert mine == agreed
        assert not _free(agreed.claim)


@pytest.mark.parametrize("head", [True, False])
def test_the_options_of_ray_start_are_disjoint(head):
    plan = ports.plan("1/1", ephemeral=LINUX)
    numbers = [int(option.rpartition("=")[2]) for option in plan.ray_options(head)]
    low, high = plan.workers
    assert len(numbers) == len(set(numbers))
    assert not [number for number in numbers if low < number < high]


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
