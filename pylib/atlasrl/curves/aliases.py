"""One name per metric over all frameworks (aliases.yaml)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import yaml

from atlasrl.curves.curve import Curve, Run
from atlasrl.errors import UsageFault

FILE = Path(__file__).with_name("aliases.yaml")


@dataclass(frozen=True)
class Metric:
    """A metric and the tags it may have, best first."""

    name: str
    title: str
    tags: tuple[str, ...]


@functools.cache
def known() -> dict[str, Metric]:
    """All metrics of aliases.yaml by name."""
    metrics = {}
    for name, entry in yaml.safe_load(FILE.read_text()).items():
        tags = [tag for framework, tags in entry.items() if framework != "title" for tag in tags]
        metrics[name] = Metric(name, entry["title"], tuple(dict.fromkeys(tags)))
    return metrics


def with_changes(changes: list[str]) -> dict[str, Metric]:
    """The known metrics with `NAME=TAG` changes; a new name becomes a metric of its own.

    Raises:
        UsageFault: a change is not NAME=TAG.
    """
    metrics = dict(known())
    for change in changes:
        name, separator, tag = change.partition("=")
        if not (name and separator and tag):
            raise UsageFault(f"--metric {change!r} is not NAME=TAG, for example --metric reward=critic/score/mean")
        title = metrics[name].title if name in metrics else name
        metrics[name] = Metric(name, title, (tag,))
    return metrics


def find(run: Run, metric: Metric) -> tuple[str, Curve] | None:
    """The tag and curve of a metric in a run, or None."""
    tag = next((tag for tag in metric.tags if tag in run.curves), None)
    return (tag, run.curves[tag]) if tag is not None else None
