"""Runs for the tests: curves with a known truth, and event files written the way training processes write them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from atlasrl.curves.curve import Curve, Run
from atlasrl.curves.eventwriter import encode_scalar, encode_version
from atlasrl.curves.records import encode

TAGS = ("critic/rewards/mean", "response_length/mean", "actor/grad_norm")


def purge_record(step: int, wall: float) -> bytes:
    """What `SummaryWriter(purge_step=step)` writes first: Event{step, session_log{status: START}}."""
    varint = bytearray()
    number = step
    while number > 0x7F:
        varint.append(number & 0x7F | 0x80)
        number >>= 7
    varint.append(number)
    return encode(b"\x09" + struct.pack("<d", wall) + b"\x10" + bytes(varint) + b"\x3a\x02\x08\x01")


def event_bytes(points: list[tuple[str, int, float]], clock: float, purge: int | None = None) -> bytes:
    """An event file of (tag, step, value) points, one second apart, as one process writes it."""
    head = encode_version(clock) + (purge_record(purge, clock) if purge is not None else b"")
    return head + b"".join(encode_scalar(tag, step, value, clock + i) for i, (tag, step, value) in enumerate(points))


def write_events(folder: Path, name: str, points: list[tuple[str, int, float]], clock: float, purge: int | None = None):
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"events.out.tfevents.{name}"
    file.write_bytes(event_bytes(points, clock, purge))
    return file


def truth(tag: str, step: int, course: int = 0) -> float:
    """A float32 value that depends on tag, step and, for an abandoned course, on the attempt."""
    seed = [TAGS.index(tag) if tag in TAGS else 99, step, course]
    return float(np.float32(np.random.default_rng(seed).normal()))


def points(first: int, last: int, course: int = 0, tags: tuple[str, ...] = TAGS) -> list[tuple[str, int, float]]:
    """All tags of the steps first..last, in the order a trainer logs them."""
    return [(tag, step, truth(tag, step, course)) for step in range(first, last + 1) for tag in tags]


def plain(run: Run) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run as lists, for comparison by ==."""
    return {tag: list(zip(c.steps.tolist(), c.values.tolist(), strict=True)) for tag, c in run.curves.items()}


def dapo_run(seed: int, steps: int = 200, speed: float = 1.0, noise: float = 0.05, name: str | None = None) -> Run:
    """A run that looks like DAPO: reward and length rise, entropy falls, all the faster with `speed`."""
    rng = np.random.default_rng(seed)
    step = np.arange(1, steps + 1)
    passed = step * speed
    values = {
        "critic/rewards/mean": -0.9 + 1.2 * (1 - np.exp(-passed / 120)) + rng.normal(0, noise, steps),
        "response_length/mean": 300 + 200 * (1 - np.exp(-passed / 150)) + rng.normal(0, 12, steps),
        "response_length/max": np.full(steps, 1024.0),
        "actor/pg_loss": rng.normal(0, 0.03, steps),
        "actor/grad_norm": 0.3 * np.exp(rng.normal(0, 0.2, steps)),
        "actor/entropy": 0.8 * np.exp(-passed / 300) + rng.normal(0, 0.01, steps),
        "perf/total_num_tokens": np.full(steps, 1000.0),
    }
    nothing = np.full(steps, np.nan)
    return Run(name or f"seed{seed}", {tag: Curve(step, value, nothing) for tag, value in values.items()})


def changed(run: Run, tag: str, values: np.ndarray) -> Run:
    """The same run with other values of one tag."""
    curve = run.curves[tag]
    return Run(
        run.name, {**run.curves, tag: Curve(curve.steps, values, curve.walls)}, run.attempts, context=run.context
    )


def write_jsonl(run: Run, file: Path) -> Path:
    """The run as verl's file logger writes it."""
    rows: dict[int, dict[str, float]] = {}
    for tag, curve in run.curves.items():
        for step, value in zip(curve.steps.tolist(), curve.values.tolist(), strict=True):
            rows.setdefault(step, {})[tag] = value
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"step": step, "data": rows[step]}) + "\n" for step in sorted(rows)))
    return file
