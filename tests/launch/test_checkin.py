"""What the nodes say of themselves before a job starts, compared."""

import os
import subprocess
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlasrl.errors import Fault
from atlasrl.launch import checkin, ports


def answer(node: str, address: str | None = None, faults=(), held=(), **facts) -> dict:
    address = address or f"10.0.0.{int(node[-2:])}"
    return {"node": node, "address": address, "faults": list(faults), "held": dict(held), "facts": facts}


def test_equal_nodes_may_start():
    assert checkin.problems([answer("node01", a="1"), answer("node02", a="1")]) == []


def test_every_odd_node_is_named_with_what_differs():
    found = checkin.problems(
        [
            answer("node01", **{"$OMP_NUM_THREADS": "1", "package torch": "2.13.0"}),
            answer("node02", **{"$OMP_NUM_THREADS": "4", "package torch": "2.13.0"}),
            answer("node03", faults=["node03: no network interface eth0"], **{"package torch": "2.12.0"}),
        ]
    )
    assert found[0] == "node03: no network interface eth0"
    assert "node02: its environment differs from node01's: $OMP_NUM_THREADS is '4' there and '1' here" in found
    assert (
        "package torch is '2.12.0' there and '2.13.0' here" in found[2]
        and "$OMP_NUM_THREADS is absent there" in found[2]
    )


def test_many_differences_are_counted_not_listed():
    here, there = {f"$RAY_{n}": "1" for n in range(20)}, {f"$RAY_{n}": "2" for n in range(20)}
    (line,) = checkin.problems([answer("node01", **here), answer("node02", **there)])
    assert line.endswith("; 17 more") and len(line) < 300


def test_two_nodes_with_one_address_are_refused():
    (line,) = checkin.problems([answer("node01", "10.0.0.9"), answer("node02", "10.0.0.9")])
    assert "node02 and node01 have the same address 10.0.0.9" in line


@given(st.text(max_size=200))
def test_a_value_of_any_length_stays_short(value):
    assert len(next(checkin.differences({"$X": value}, {}))) < 300


def test_ports_move_for_a_holder_on_any_node_and_name_it(monkeypatch):
    monkeypatch.setattr(ports, "ephemeral_range", lambda: (32768, 60999))
    wish = ports.plan("run/1")
    held = {str(wish.gcs): "pid 17 (redis, user db)"}
    agreed = checkin.agree_on_ports("run/1", [answer("node01"), answer("node02", held=held)])
    assert agreed.first != wish.first
    assert f"{wish.gcs} is held by pid 17 (redis, user db) on node02" in agreed.reason


def test_ports_held_everywhere_are_a_fault(monkeypatch):
    monkeypatch.setattr(ports, "ephemeral_range", lambda: (32768, 60999))
    held = {str(port): "pid 1 (x, user y)" for port in range(10000, 32768, 400)}
    with pytest.raises(Fault, match="no block of 512 free ports"):
        checkin.agree_on_ports("run/1", [answer("node01", held=held)])


def test_the_code_hash_sees_a_changed_and_a_renamed_file(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    first = checkin.code_hash(tmp_path)
    (tmp_path / "a.py").write_text("x = 2\n")
    second = checkin.code_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, checkin.code_hash(tmp_path)}) == 3


def test_what_differs_by_right_is_no_fact():
    """Variables of the scheduler, of the host and of the device list differ from node to node."""
    code = "from atlasrl.launch import checkin; print(list(checkin.steering_variables()))"
    told = {"SLURM_NODEID": "3", "HOSTNAME": "x", "ASCEND_RT_VISIBLE_DEVICES": "0", "HCCL_BUFFSIZE": "200"}
    env = {**os.environ, **told, "PYTHONPATH": "pylib"}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "$HCCL_BUFFSIZE" in shown.stdout
    assert not [name for name in ("SLURM_NODEID", "HOSTNAME", "ASCEND_RT_VISIBLE") if name in shown.stdout]


@pytest.mark.parametrize(
    ("device", "there", "visible", "words"),
    [
        ("npu", 8, None, None),
        ("npu", 7, None, "node07: 7 NPUs are there (davinci0, "),
        ("npu", 8, "0,1,2,3", "4 NPUs are there"),
        ("npu", 0, None, "node07: 0 NPUs are there (no "),
        ("cpu", 0, None, None),
    ],
)
def test_missing_devices_are_counted(device, there, visible, words, tmp_path, monkeypatch):
    for number in range(there):
        (tmp_path / f"davinci{number}").touch()
    (tmp_path / "davinci_manager").touch()
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible) if visible else monkeypatch.delenv(
        "ASCEND_RT_VISIBLE_DEVICES", raising=False
    )
    plan = types.SimpleNamespace(recipe=types.SimpleNamespace(device=device), devices_per_node=8)
    found = checkin.missing_devices(plan, "node07", tmp_path)
    assert found is None if words is None else words in found
