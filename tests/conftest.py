"""Order and grouping of the slow tests for `make test`, which runs them in two processes (pytest-xdist, loadgroup)."""

import pytest

FIRST = ("cluster", "training", "verl")  # the longest queue starts first, so that both processes end together


def pytest_collection_modifyitems(items):
    """Tests on the Slurm cluster share one; the others of a file share its fixtures. Fast tests stay as they are."""

    def place(item) -> int:
        return next((place for place, name in enumerate(FIRST) if item.get_closest_marker(name)), len(FIRST))

    items.sort(key=place)
    for item in items:
        if place(item) < len(FIRST):
            shared = item.path.parent if item.path.parent.name == "cluster" else item.path
            item.add_marker(pytest.mark.xdist_group(str(shared)))
