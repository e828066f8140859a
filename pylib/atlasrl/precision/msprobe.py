"""Drive Ascend's msprobe (PyPI mindstudio-probe) where it is installed: write its config, find its result.

msprobe knows what torch's hooks do not see on an NPU (kernels, communication). `dumps.read` takes in its level L0, so
that dumps of msprobe on two machines are bisected as this project's own are.

Source: the config.json that mindstudio-probe 26.2.0 installs, and its docs/dump/config_json_introduct.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import write_atomically


def is_installed() -> bool:
    """Whether `import msprobe` would find something; it is not imported."""
    return importlib.util.find_spec("msprobe") is not None


def config(
    folder: Path, *, level: str = "L0", modules: list[str] | None = None, steps: list[int] | None = None
) -> dict:
    """msprobe's configuration: statistics of every module call, or of those between two named modules."""
    return {
        "task": "statistics",
        "dump_path": str(folder),
        "rank": [],
        "step": steps or [],
        "level": level,
        "statistics": {"scope": modules or [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    }


@contextlib.contextmanager
def watch(model, folder: Path) -> Iterator[None]:
    """Dump the forward and backward pass inside the block.

    Raises:
        UsageFault: msprobe is not installed, or the folder holds something.
    """
    if not is_installed():
        raise UsageFault("msprobe is not installed: pip install mindstudio-probe, or leave --tool msprobe out")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageFault(f"{folder} is not empty; a dump needs a folder of its own")
    from msprobe.pytorch import PrecisionDebugger

    file = folder / "config.json"
    write_atomically(file, json.dumps(config(folder), indent=1) + "\n")
    debugger = PrecisionDebugger(config_path=str(file))
    debugger.start(model=model)
    try:
        yield
    finally:
        debugger.stop()
        debugger.step()


def result(folder: Path) -> Path:
    """The folder below `folder` that holds the dump of the first step and rank.

    Raises:
        Fault: msprobe wrote none.
    """
    found = sorted(folder.glob("step*/*/dump.json"))
    if not found:
        raise Fault(f"msprobe wrote no dump below {folder}; its log above says why")
    return found[0].parent
