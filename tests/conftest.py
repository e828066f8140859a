"""What is collected, and in which order, for `make test-fast` and `make test`."""

import re

import pytest
from _pytest.mark.expression import Expression

SLOW = ("cluster", "training", "verl", "browser", "nightly")
"""The longest queue starts first, so that both processes of `make test` end together."""
OF_THE_FILE = re.compile(rf"^pytestmark = pytest\.mark\.({'|'.join(SLOW)})$", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Do not import torch, verl and Ray, 20 s in all, only to deselect every test of the file."""
    if collection_path.suffix != ".py" or not config.option.markexpr:
        return None
    mark = OF_THE_FILE.search(collection_path.read_text())
    if mark is None:
        return None
    wanted = Expression.compile(config.option.markexpr)
    alone = wanted.evaluate(lambda name, **_: name == mark[1])
    return None if alone or wanted.evaluate(lambda name, **_: name in SLOW) else True  # a test may carry several marks


@pytest.hookimpl(wrapper=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    """Two processes (pytest-xdist, loadgroup): tests on the Slurm cluster share it, others their file's fixtures."""

    def place(item) -> int:
        return next((place for place, name in enumerate(SLOW) if item.get_closest_marker(name)), len(SLOW))

    items.sort(key=place)
    for item in items:
        if place(item) < len(SLOW):
            shared = item.path.parent if item.path.parent.name == "cluster" else item.path
            item.add_marker(pytest.mark.xdist_group(str(shared)))
    return (yield)
