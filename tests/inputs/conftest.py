"""Input scripts as modules: they stand outside the package and import their neighbours by plain names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

INPUTS = Path(__file__).resolve().parents[2] / "jobs" / "inputs"


def load_script(folder: str, name: str):
    """Import jobs/inputs/<folder>/<name>.py as if it were run there, without leaving its neighbours behind."""
    home = INPUTS / folder
    neighbours = {file.stem for file in home.glob("*.py")}
    kept = {module: sys.modules.pop(module) for module in neighbours & set(sys.modules)}
    sys.path.insert(0, str(home))
    try:
        spec = importlib.util.spec_from_file_location(f"inputs_{folder}_{name}", home / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(home))
        for neighbour in neighbours & set(sys.modules):
            del sys.modules[neighbour]
        sys.modules.update(kept)


@pytest.fixture
def script():
    return load_script
