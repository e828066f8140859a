"""Train the tiny recipe with several seeds and planted faults, and keep the scalars that bin/compare judges.

    env/python tests/curves/real_runs/record.py FOLDER [NAME ...]

Runs are made in FOLDER/runs (a finished one is not trained again); NAME.csv.gz files are written beside this script.
About two minutes per run on two idle cores.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

from atlasrl.curves import aliases, load
from atlasrl.rundir import RunDir

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[2]
ALIKE = ["steps=30", "validate_every=0", "checkpoint.save_every=30"]
PLANTED = 'verl={"actor_rollout_ref.model.external_lib": "tests.curves.real_runs.%s"}'
RUNS = {
    "seed1": ["seed=1"],
    "seed2": ["seed=2"],
    "seed3": ["seed=3"],
    "seed4": ["seed=4"],
    "learning_rate_x3": ["seed=5", "optimizer.learning_rate=6e-4"],
    "shuffled_answers": ["seed=6", "data.train={shuffled}"],
    "frozen_sync": ["seed=7", PLANTED % "frozen_sync"],
    "wrong_scale": ["seed=8", PLANTED % "wrong_scale", "environment.ATLASRL_WITHOUT_FIX=alarm-at-start"],
}
"""A run of the wrong scale would not start: the alarm finds it first."""


def main(folder: Path, names: list[str]) -> None:
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    shuffled = shuffle_answers(folder / "shuffled.parquet")
    for name in names or RUNS:
        run = RunDir(runs / name)
        if not any(attempt.outcome.exists() for attempt in run.attempts()):
            changes = [change.replace("{shuffled}", str(shuffled)) for change in (*ALIKE, *RUNS[name])]
            settings = [word for change in changes for word in ("--set", change)]
            train = [str(PROJECT / "bin/train"), "tiny", "--name", name, "--runs", str(runs), "--follow", *settings]
            subprocess.run(train, check=True)
        keep(run.path, HERE / f"{name}.csv.gz")


def shuffle_answers(file: Path) -> Path:
    """The recipe's training data with the right answers of other questions."""
    import numpy
    import pandas

    data = pandas.read_parquet(PROJECT / "jobs/inputs/tiny/train.parquet")
    order = numpy.random.default_rng(0).permutation(len(data))
    data["reward_model"] = [data["reward_model"].iloc[i] for i in order]
    data.to_parquet(file)
    return file


def keep(run: Path, file: Path) -> None:
    """Write the tags that some metric uses as a compressed long table."""
    curves = load.load(str(run)).curves
    used = {tag for metric in aliases.known().values() for tag in metric.tags} & set(curves)
    rows = ["tag,step,value"]
    for tag in sorted(used):
        curve = curves[tag]
        rows += [f"{tag},{s},{v:.9g}" for s, v in zip(curve.steps.tolist(), curve.values.tolist(), strict=True)]
    file.write_bytes(gzip.compress("\n".join([*rows, ""]).encode(), mtime=0))
    print(f"{file.name}: {len(used)} curves, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
