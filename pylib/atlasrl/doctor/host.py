"""One node as the checks see it: files, tools, installed packages, limits. Tests put an emulated node in its place."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

TOOLS = "/usr/local/sbin:/usr/local/bin:/usr/local/Ascend/driver/tools:/usr/sbin:/usr/bin:/sbin:/bin"
SECONDS = 30.0  # npu-smi needs a few seconds on a busy node; more means that the driver hangs


@dataclass(frozen=True)
class Answer:
    """What a tool said. `code` is None when it gave no answer in time."""

    code: int | None
    text: str

    @property
    def fields(self) -> dict[str, str]:
        """The `key : value` lines of npu-smi and hccn_tool."""
        pairs = (line.partition(":") for line in self.text.splitlines() if ":" in line)
        return {key.strip(): value.strip() for key, _, value in pairs}


@dataclass(frozen=True)
class Host:
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    name: str = field(default_factory=socket.gethostname)
    python: str = sys.executable
    site: tuple[Path, ...] | None = None
    """Folders of installed packages; None: those of this interpreter."""
    clock: Callable[[], float] = time.time
    usage: Callable = shutil.disk_usage
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit

    def path(self, absolute: str | Path) -> Path:
        return self.root / str(absolute).lstrip("/")

    def read(self, absolute: str | Path) -> str | None:
        """A file's text, or None where it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace")
        except OSError:
            return None

    def run(self, *command: str, seconds: float = SECONDS) -> Answer | None:
        """Run a tool; None: it is not installed."""
        tool = shutil.which(command[0], path=f"{self.environment.get('PATH', '')}:{TOOLS}")
        if tool is None:
            return None
        try:
            done = subprocess.run(
                [tool, *command[1:]],
                env={**self.environment, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(None, f"no answer within {seconds:.0f} s")
        return Answer(done.returncode, done.stdout)

    @property
    def search(self) -> list[Path]:
        """The folders that imports look into, in that order."""
        return list(self.site) if self.site is not None else [Path(entry) for entry in sys.path]

    @cached_property
    def packages(self) -> dict[str, str]:
        """Normalised name -> version of what is installed, by its metadata; the first on the path counts."""
        path = {"path": [str(folder) for folder in self.site]} if self.site is not None else {}
        found: dict[str, str] = {}
        for distribution in importlib.metadata.distributions(**path):
            if name := distribution.metadata["Name"]:
                found.setdefault(normalised(name), distribution.version)
        return found

    def package(self, name: str) -> list[Path]:
        """The folders that `import name` would take a top-level package from. Nothing is imported."""
        try:
            if self.site is None:
                spec = importlib.util.find_spec(name)
            else:
                spec = importlib.machinery.PathFinder.find_spec(name, [str(folder) for folder in self.site])
        except (ImportError, ValueError):
            return []
        return [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]

    def source(self, file: str) -> str | None:
        """Text of a file of an installed package, such as `mbridge/core/bridge.py`."""
        top, _, rest = file.partition("/")
        for folder in self.package(top):
            if (folder / rest).is_file():
                return (folder / rest).read_text(errors="replace")
        return None


def normalised(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()
