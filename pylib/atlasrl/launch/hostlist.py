"""Slurm host lists: `node[01-03,07],login1` <-> names.

Kept in Python, and never in a shell array: `nodes_array=("$nodes")` makes one element of all hosts (verl#548).
"""

from __future__ import annotations

import re

from atlasrl.errors import UsageFault

MAX_HOSTS = 65536  # Slurm's own limit of a host list


def expand(text: str) -> list[str]:
    """The names of a Slurm host list, in its order, zero padding kept.

    >>> expand("rack[1-2]node[09-10],login1")
    ['rack1node09', 'rack1node10', 'rack2node09', 'rack2node10', 'login1']

    Raises:
        UsageFault: unbalanced brackets, an empty or descending range, or more than 65536 hosts.
    """
    names: list[str] = []
    for item in _split(text):
        names += _product(item, text)
        if len(names) > MAX_HOSTS:
            raise UsageFault(f"host list {_short(text)!r} has more than {MAX_HOSTS} hosts")
    return names


def compress(names: list[str]) -> str:
    """A short text for messages: the last number of names with equal prefix and width becomes a range.

    >>> compress(["node07", "node01", "node02", "login"])
    'login,node[01-02,07]'
    """
    groups: dict[tuple[str, int, str], set[int]] = {}
    plain = set()
    for name in names:
        match = re.fullmatch(r"(.*?)(\d{1,18})(\D*)", name)
        if match is None:
            plain.add(name)
        else:
            groups.setdefault((match[1], len(match[2]), match[3]), set()).add(int(match[2]))
    texts = sorted(plain)
    for (prefix, width, suffix), numbers in sorted(groups.items()):
        ranges = ",".join(
            f"{low:0{width}}" if low == high else f"{low:0{width}}-{high:0{width}}" for low, high in _runs(numbers)
        )
        texts.append(f"{prefix}{ranges}{suffix}" if len(numbers) == 1 else f"{prefix}[{ranges}]{suffix}")
    return ",".join(texts)


def _split(text: str) -> list[str]:
    """Cut at commas outside brackets."""
    items, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise UsageFault(f"host list {_short(text)!r}: brackets do not match")
        if character == "," and depth == 0:
            items.append(text[start:position])
            start = position + 1
    if depth:
        raise UsageFault(f"host list {_short(text)!r}: brackets do not match")
    items = [item.strip() for item in [*items, text[start:]]]
    if any(not item for item in items):
        raise UsageFault(f"host list {_short(text)!r} has an empty entry")
    return items


def _product(item: str, text: str) -> list[str]:
    names = [""]
    for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", item):
        parts = [literal] if literal else _numbers(ranges, text)
        if len(names) * len(parts) > MAX_HOSTS:
            raise UsageFault(f"host list {_short(text)!r} has more than {MAX_HOSTS} hosts")
        names = [name + part for name in names for part in parts]
    return names


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low or high - low >= MAX_HOSTS:
            raise UsageFault(f"host list {_short(text)!r}: {_short(part)!r} is no number or rising range such as 01-32")
        numbers += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return numbers


def _runs(numbers: set[int]) -> list[tuple[int, int]]:
    """Runs of neighbours, so that {1, 2, 3, 7} is [(1, 3), (7, 7)]."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
