"""The device test: equal devices agree in every bit, and a broken or slow one is named with its node."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from atlasrl.precision import stress  # noqa: E402
from atlasrl.precision.stress import Report, judge  # noqa: E402

pytestmark = pytest.mark.verl

GOOD = Report("node0", "0", "910B", ["aa", "aa", "aa"], [1.0, 1.01, 0.99], link_seconds=0.1)


def fleet(**changed) -> list[Report]:
    """Sixteen good devices on four nodes; `changed` fields are those of node2 device 3."""
    made = [replace(GOOD, node=f"node{n}", device=str(d)) for n in range(4) for d in range(4)]
    made[11] = replace(made[11], **changed)
    return made


def test_equal_devices_are_proven_equal():
    verdict = judge(fleet())
    assert verdict.ok and not verdict.slow and verdict.exclude(slow_too=True) == ""
    assert list(stress.lines(fleet(), verdict))[-1] == "all 16 devices agree in every bit"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"digests": ["bb", "bb", "bb"]}, "computes bb, the majority of its kind aa"),
        ({"digests": ["aa", "bb", "aa"]}, "gives 2 different results for the same products in 3 rounds"),
        ({"memory_errors": 7}, "memory lost 7 of the words"),
        ({"link": "the block from device number 10 arrived damaged"}, "arrived damaged"),
        ({"problem": "out of memory", "digests": [], "seconds": []}, "could not do the work: out of memory"),
    ],
)
def test_a_broken_device_is_named_and_its_node_excluded(changed, words):
    verdict = judge(fleet(**changed))
    [[sentence]] = verdict.odd.values()
    assert sentence.startswith("node2 device 3: ") and words in sentence
    assert verdict.exclude() == "node2" and not verdict.slow


def test_a_slow_device_is_named_but_only_excluded_on_request():
    verdict = judge(fleet(seconds=[1.5, 1.5, 9.0]))
    assert verdict.ok and verdict.slow == {"node2": ["node2 device 3: takes 1.50 times as long as its kind"]}
    assert (verdict.exclude(), verdict.exclude(slow_too=True)) == ("", "node2")
    assert "link takes 5.0 times" in judge(fleet(link_seconds=0.5)).slow["node2"][0]


def test_devices_of_different_kinds_need_not_agree():
    mixed = [
        replace(report, kind="910C", digests=["cc"] * 3, seconds=[0.2]) if i % 2 else report
        for i, report in enumerate(fleet())
    ]
    assert judge(mixed).ok and not judge(mixed).slow


def test_without_a_majority_nobody_is_called_right():
    two = [GOOD, replace(GOOD, node="node1", digests=["bb"] * 3)]
    assert set(judge(two).odd) == {"node0", "node1"}


def test_the_work_is_deterministic_and_sees_one_flipped_bit(monkeypatch):
    first, second = (stress.work(32, 2, "cpu", memory=4096) for _ in range(2))
    assert first["digests"] == second["digests"] and len(set(first["digests"])) == 1
    assert first["memory_errors"] == 0
    original = torch.Tensor.__matmul__

    def flipped(left, right):
        product = original(left, right)
        if product.dtype == torch.float32:
            product.view(torch.int32)[3, 5] ^= 1 << 12
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", flipped)
    assert stress.work(32, 1, "cpu", memory=4096)["digests"][0] != first["digests"][0]
