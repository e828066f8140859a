"""Write runs as a TensorBoard logdir in which all of them share the same tags, with a custom-scalars layout."""

from __future__ import annotations

import re
import time
from pathlib import Path

from atlasrl.curves import aliases
from atlasrl.curves.aliases import Metric
from atlasrl.curves.curve import Run
from atlasrl.curves.eventwriter import encode_scalar, encode_version
from atlasrl.curves.records import encode
from atlasrl.errors import UsageFault


def write(folder: Path, candidates: list[Run], baselines: list[Run], metrics: dict[str, Metric]) -> list[str]:
    """Write one run folder per seed, tags named after the metrics; returns the folder names.

    Raises:
        UsageFault: the folder exists and is not empty. TensorBoard would show what is in it too.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageFault(f"{folder} is not empty; TensorBoard would mix its runs with these, choose a new folder")
    names: list[str] = []
    used: set[str] = set()
    for role, runs in (("baseline", baselines), ("candidate", candidates)):
        for run in runs:
            name = _free(f"{role}-{re.sub(r'[^A-Za-z0-9._-]+', '-', run.name)}", names)
            names.append(name)
            used |= _write_run(folder / name, run, metrics)
    _write_layout(folder / names[0], [metrics[name] for name in metrics if name in used])
    return names


def _free(name: str, taken: list[str]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _write_run(folder: Path, run: Run, metrics: dict[str, Metric]) -> set[str]:
    folder.mkdir(parents=True)
    found = {name: hit[1] for name, metric in metrics.items() if (hit := aliases.find(run, metric))}
    now = time.time()
    with (folder / f"events.out.tfevents.{int(now)}.compare").open("xb") as file:
        file.write(encode_version(now))
        for name, curve in found.items():
            for step, value, wall in zip(
                curve.steps.tolist(), curve.values.tolist(), curve.walls.tolist(), strict=True
            ):
                file.write(encode_scalar(name, step, value, wall if wall == wall else now))
    return set(found)


def _write_layout(folder: Path, shown: list[Metric]) -> None:
    """The custom-scalars layout: one chart per metric over all runs."""
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    charts = [
        layout_pb2.Chart(title=m.title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{re.escape(m.name)}$"]))
        for m in shown
    ]
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="Comparison", chart=charts)])
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[layout.SerializeToString()])
    value = summary_pb2.Summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG, metadata=metadata.create_summary_metadata(), tensor=tensor
    )
    now = time.time()
    event = event_pb2.Event(wall_time=now, summary=summary_pb2.Summary(value=[value]))
    with (folder / f"events.out.tfevents.{int(now)}.layout").open("xb") as file:
        file.write(encode_version(now))
        file.write(encode(event.SerializeToString()))
