"""The installed stack: pinned versions against found ones, and whether the packages import.

`python -m atlasrl.installed --device cpu` is the last step of env/setup.sh and a check of the preflight stage.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from importlib import metadata
from pathlib import Path

ENV = Path(__file__).resolve().parents[2] / "env"
PIN = re.compile(r"([A-Za-z0-9._-]+)==([^\s;#]+)\s*(?:;\s*([^#]+))?")

# One import per corner of the stack; a package can be installed and still not load.
IMPORTS = {
    "cpu": ["torch", "ray", "pyarrow", "safetensors", "submitit", "tensorboard"],
    "npu": ["submitit", "safetensors"],
}


def pins(device: str) -> dict[str, str]:
    """Name -> version of every direct requirement of a device that applies to this Python."""
    found = {}
    for file in sorted(ENV.glob(f"requirements-{device}*.txt")):
        for line in file.read_text().splitlines():
            if match := PIN.match(line):
                name, version, marker = match.groups()
                if marker is None or _applies(marker):
                    found[name] = version
    return found


def _applies(marker: str) -> bool:
    from packaging.markers import Marker

    return Marker(marker.strip()).evaluate()


def differences(device: str) -> list[str]:
    """One line per package whose version is not the pinned one, or that is missing."""
    lines = []
    for name, wanted in pins(device).items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            lines.append(f"{name}: {wanted} expected, not installed")
            continue
        if found.partition("+")[0] != wanted:  # +cpu and the like name a build, not a version
            lines.append(f"{name}: {wanted} expected, {found} found")
    return lines


def import_failures(device: str) -> list[str]:
    """One line per package that does not import."""
    lines = []
    for name in IMPORTS[device]:
        try:
            importlib.import_module(name)
        except Exception as problem:
            lines.append(f"import {name}: {type(problem).__name__}: {problem}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(IMPORTS), required=True)
    device = parser.parse_args().device
    problems = differences(device) + import_failures(device)
    for line in problems:
        print(line)
    print(f"{len(pins(device))} pinned packages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
