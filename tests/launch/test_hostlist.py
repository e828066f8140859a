"""Host lists as Slurm prints them; `scontrol show hostnames` is the reference where Slurm is installed."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlasrl.errors import UsageFault
from atlasrl.launch import hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,07],login1", ["node01", "node02", "node03", "node07", "login1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[08-10]x", ["n08x", "n09x", "n10x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1],b[2-2]", ["a1", "b2"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_expands_like_slurm(text, names):
    assert hostlist.expand(text) == names
    if shutil.which("scontrol"):
        shown = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, check=False)
        assert shown.returncode or shown.stdout.split() == names


def test_32_hosts_are_32_elements():
    assert len(hostlist.expand("node[01-32]")) == 32


@pytest.mark.parametrize(
    "text", ["", "a[1-", "a]1[", "a[[1]]", "a[3-1]", "a[x]", "a[1,,2]", "a,,b", "a[]", "a[0-99999]", "a[0-999]b[0-999]"]
)
def test_bad_lists_are_refused(text):
    with pytest.raises(UsageFault):
        hostlist.expand(text)


@given(st.lists(st.integers(0, 200), min_size=1, unique=True), st.sampled_from(["node{:02}", "n{}", "r1n{:03}x"]))
def test_compressed_lists_expand_to_the_same_hosts(numbers, form):
    names = [form.format(number) for number in numbers]
    assert sorted(hostlist.expand(hostlist.compress(names))) == sorted(names)
