"""How fast event files are read, and how fast a live run is judged.

    env/python tests/bench/bench_curves.py [--points 1000000]

Reads the same 20 event files with 50 tags with our reader, TensorBoard's EventAccumulator and tbparse, each in a
process of its own, one after another; then follows a run of 1000 steps and 50 tags. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "pylib"))

from atlasrl.curves import crc32c
from atlasrl.curves.eventwriter import encode_scalar, encode_version

FILES, TAGS = 20, [f"group{i % 7}/metric_{i}/mean" for i in range(50)]
READERS = {
    "atlasrl": "from atlasrl.curves.load import load\ncount = sum(map(len, load(folder).curves.values()))",
    "EventAccumulator": (
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(folder, size_guidance={'scalars': 0})\nfound.Reload()\n"
        "count = sum(len(found.Scalars(tag)) for tag in found.Tags()['scalars'])"
    ),
    "tbparse": "from tbparse import SummaryReader\ncount = len(SummaryReader(folder).scalars)",
}
CHILD = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[2])
folder = sys.argv[1]
started = time.process_time(), time.perf_counter()
{reader}
spent = [time.process_time() - started[0], time.perf_counter() - started[1]]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps(dict(points=count, cpu=spent[0], wall=spent[1], peak=peak)))
"""
TARGET_RATIO, TARGET_UPDATE = 10, 0.050


def write_files(folder: Path, points: int) -> None:
    """`points` scalars of 50 tags in 20 files, as SummaryWriter writes them: a step's tags after one another."""
    steps = points // len(TAGS)
    for number, part in enumerate(np.array_split(np.arange(1, steps + 1), FILES)):
        with (folder / f"events.out.tfevents.{1700000000 + number}.host.{number}").open("wb") as file:
            file.write(encode_version(1700000000.0))
            for same_width in np.split(part, np.flatnonzero(np.diff([_width(step) for step in part])) + 1):
                file.write(np.concatenate([_rows(tag, same_width) for tag in TAGS], axis=1).tobytes())


def _width(step: int) -> int:
    return (int(step).bit_length() + 6) // 7


def _rows(tag: str, steps: np.ndarray) -> np.ndarray:
    """Records of one tag, one per row, with step numbers of one width: one record with its bytes changed."""
    rows = np.tile(np.frombuffer(encode_scalar(tag, int(steps[0]), 0.0, 0.0), np.uint8), (len(steps), 1))
    width = _width(steps[0])
    walls, values = 1.7e9 + steps.astype("<f8"), np.random.default_rng(0).normal(size=len(steps)).astype("<f4")
    rows[:, 13:21] = walls.view(np.uint8).reshape(-1, 8)
    for place in range(width):
        more = 0x80 if place < width - 1 else 0
        rows[:, 22 + place] = steps >> (7 * place) & 0x7F | more
    rows[:, -8:-4] = values.view(np.uint8).reshape(-1, 4)
    rows[:, -4:] = crc32c.masked(rows[:, 12:-4]).astype("<u4").view(np.uint8).reshape(-1, 4)
    return rows


def read_with(reader: str, folder: Path) -> dict:
    command = [sys.executable, "-c", CHILD.format(reader=READERS[reader]), str(folder)]
    done = subprocess.run(
        [*command, str(Path(__file__).resolve().parents[2] / "pylib")], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{reader} failed: {done.stderr[-400:]}")
    return json.loads(done.stdout.splitlines()[-1])


def live_updates(folder: Path) -> np.ndarray:
    """Seconds of CPU for each of the last 100 updates of a run that grows to 1000 steps: read, merge, judge."""
    from atlasrl.curves import guard, load, rules

    curves = ["critic/rewards/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"]
    tags = [*curves, *TAGS[len(curves) :]]
    rng = np.random.default_rng(0)

    def step_bytes(step: int) -> bytes:
        return b"".join(
            encode_scalar(tag, step, float(rng.normal(np.tanh(step / 300), 0.05)), 1.7e9 + step) for tag in tags
        )

    def whole(name: str, steps: int) -> Path:
        file = folder / name / "events.out.tfevents.1.host"
        file.parent.mkdir()
        file.write_bytes(encode_version(1.7e9) + b"".join(step_bytes(step) for step in range(1, steps + 1)))
        return file

    seeds = [load.load(str(whole(f"seed{seed}", 1000).parent)) for seed in (1, 2, 3)]
    live = whole("live", 900)
    watch = guard.Watch(load.RunReader(str(live.parent)), guard.Guard(rules.load(), seeds))
    watch.update()
    spent = []
    for step in range(901, 1001):
        with live.open("ab") as file:
            file.write(step_bytes(step))
        started = time.process_time()
        watch.update()
        spent.append(time.process_time() - started)
    return np.array(spent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    points = parser.parse_args().points
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "events"
        folder.mkdir()
        write_files(folder, points)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{points} points, {len(TAGS)} tags, {FILES} event files, {size / 1e6:.0f} MB")
        results = {reader: read_with(reader, folder) for reader in READERS}
        ours = results["atlasrl"]
        print(
            f"{'reader':18}{'points':>10}{'CPU s':>9}{'wall s':>9}{'peak MB':>9}{'CPU / ours':>12}{'peak / ours':>13}"
        )
        for reader, r in results.items():
            ratios = f"{r['cpu'] / ours['cpu']:11.1f}x{r['peak'] / ours['peak']:12.1f}x"
            print(f"{reader:18}{r['points']:10}{r['cpu']:9.2f}{r['wall']:9.2f}{r['peak'] / 1024:9.0f}{ratios}")
        spent = live_updates(Path(scratch))
    typical, worst = np.median(spent), spent.max()
    print(
        f"live update at 1000 steps, 3 baseline seeds: median {1e3 * typical:.1f} ms, worst {1e3 * worst:.1f} ms of CPU"
    )
    fast = all(
        r["cpu"] >= TARGET_RATIO * ours["cpu"] and r["peak"] > ours["peak"] for n, r in results.items() if r is not ours
    )
    complete = all(r["points"] == ours["points"] == points for r in results.values())
    met = fast and complete and typical < TARGET_UPDATE
    print("targets (10x, less memory, 50 ms): " + ("met" if met else "MISSED"))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
