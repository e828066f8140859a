"""What is collected, and in which order, for `make test-fast` and `make test`."""

import re

from _pytest.mark.expression import Expression
from xdist.scheduler import LoadFileScheduling

SLOW = ("training", "cluster", "verl", "browser", "nightly")
"""The longest queues start first, tests/cluster before all, so that both processes of `make test` end together."""
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


def pytest_collection_modifyitems(items):
    def place(item) -> int:
        if item.nodeid.startswith("tests/cluster/"):
            return -1
        return next((place for place, name in enumerate(SLOW) if item.get_closest_marker(name)), len(SLOW))

    items.sort(key=place)


def pytest_xdist_make_scheduler(config, log):
    """The files of tests/cluster share one Slurm cluster, so one process runs them all."""
    return OneCluster(config, log) if config.getvalue("dist") == "loadfile" else None


class OneCluster(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return "tests/cluster" if nodeid.startswith("tests/cluster/") else super()._split_scope(nodeid)
