"""The baseline store: a compact, checksummed copy of the scalars of one or more seeds, with what made them.

baselines/NAME/
    baseline.json    seeds (source, points, steps, recipe), stack versions, git state, sha256 of each curve file
    1.csv.gz ...     one long table per seed: tag, step, wall, value
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from atlasrl.curves import load
from atlasrl.curves.curve import Run
from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import check_name, write_atomically

ROOT = Path("baselines")
STACK = (
    "verl",
    "torch",
    "torch-npu",
    "ray",
    "transformers",
    "vllm",
    "vllm-ascend",
    "megatron-core",
    "mbridge",
    "numpy",
)


def add(name: str, runs: list[Run], root: Path = ROOT) -> Path:
    """Store runs as the seeds of a new baseline; returns its folder.

    Raises:
        UsageFault: the name is taken or no folder name. A baseline never changes: take another name.
    """
    folder = root / check_name(name)
    if folder.exists():
        raise UsageFault(f"baseline {name} exists ({folder}); baselines do not change, choose another name")
    folder.mkdir(parents=True)
    seeds = []
    for number, run in enumerate(runs, 1):
        file = folder / f"{number}.csv.gz"
        data = _table(run)
        _write(file, data)
        seeds.append(
            {
                "file": file.name,
                "sha256": hashlib.sha256(data).hexdigest(),
                "run": run.name,
                "sources": run.reading.sources,
                "points": sum(len(curve) for curve in run.curves.values()),
                "last_step": run.last_step(),
                "attempts": len(run.attempts),
                "recipe": run.context.get("recipe"),
                "stack": run.context.get("versions") or run.context.get("stack"),
            }
        )
    record = {
        "name": name,
        "added": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": {"machine": platform.machine(), "python": platform.python_version(), "stack": _versions()},
        "git": _git_state(),
        "recipe": seeds[0]["recipe"],
        "seeds": seeds,
    }
    write_atomically(folder / "baseline.json", json.dumps(record, indent=1) + "\n")
    return folder


def load_seeds(name_or_path: str, root: Path = ROOT) -> list[Run]:
    """The seeds of a stored baseline, after their checksums were checked.

    Raises:
        UsageFault: no such baseline.
        Fault: a file is missing or differs from its checksum.
    """
    folder = find(name_or_path, root)
    if folder is None:
        known = ", ".join(sorted(path.parent.name for path in root.glob("*/baseline.json"))) or "none"
        raise UsageFault(f"no baseline {name_or_path!r} in {root}/ (there: {known}); add one with bin/baseline add")
    record = describe(folder)
    runs = []
    for seed in record["seeds"]:
        file = folder / Path(seed["file"]).name
        if not file.is_file():
            raise Fault(f"{file} of baseline {folder.name} is missing; restore it from where it was copied")
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != seed["sha256"]:
            raise Fault(f"{file} was changed: sha256 {found[:12]}, baseline.json says {str(seed['sha256'])[:12]}")
        run = load.load(str(file))
        run.name = f"{folder.name}/{seed['run']}"
        run.context = {"recipe": seed.get("recipe")}
        runs.append(run)
    return runs


def find(name_or_path: str, root: Path = ROOT) -> Path | None:
    """The folder of a baseline given by name or path, or None."""
    for folder in (root / name_or_path, Path(name_or_path)):
        if (folder / "baseline.json").is_file():
            return folder
    return None


def describe(folder: Path) -> dict:
    """The record of a baseline.

    Raises:
        Fault: baseline.json is damaged.
    """
    try:
        record = json.loads((folder / "baseline.json").read_text())
        if all(isinstance(seed["file"], str) and isinstance(seed["sha256"], str) for seed in record["seeds"]):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    raise Fault(f"{folder / 'baseline.json'} is damaged; restore it, or add the baseline again under another name")


def _table(run: Run) -> bytes:
    """The curves as a compressed long table; the same curves give the same bytes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["tag", "step", "wall", "value"])
    for tag, curve in sorted(run.curves.items()):
        for step, wall, value in zip(curve.steps.tolist(), curve.walls.tolist(), curve.values.tolist(), strict=True):
            writer.writerow([tag, step, "" if math.isnan(wall) else repr(wall), repr(value)])
    return gzip.compress(text.getvalue().encode(), mtime=0)


def _write(file: Path, data: bytes) -> None:
    with file.open("xb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _versions() -> dict[str, str]:
    versions = {}
    for package in STACK:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git_state() -> dict[str, str | bool] | None:
    """Commit of this code and whether it has changes; None outside a repository."""
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20, check=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}
