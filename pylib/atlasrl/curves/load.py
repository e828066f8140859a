"""Load a run from whatever it left behind: run directory, TensorBoard events, JSONL, CSV, console log, baseline."""

from __future__ import annotations

import json
from pathlib import Path

from atlasrl.curves import attempts, sessions
from atlasrl.curves.curve import Reading, Run
from atlasrl.curves.sessions import Session
from atlasrl.curves.sources import PARTIAL, EventSource, JsonLinesSource, Source, open_file
from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import RunDir


class RunReader:
    """Reads a run and reads on as it grows.

    `spec` is a path, or several separated by commas in the order they were written, with an optional `NAME=` in front.
    """

    def __init__(self, spec: str, allow_truncated: bool = False):
        self.name, self.paths = parse(spec)
        self.allow_truncated = allow_truncated
        self.sources: dict[Path, Source] = {}
        self._run: Run | None = None
        self._pairing = attempts.Pairing()

    def update(self) -> bool:
        """Read everything that was added since the last call. True when points came.

        Raises:
            UsageFault: nothing to read there.
            Fault: a file is damaged and `allow_truncated` is off.
        """
        for order, path in enumerate(self.paths, 1):
            for file, number in files_of(path):
                if file not in self.sources:
                    self.sources[file] = open_file(file, order if len(self.paths) > 1 else number)
        changed = [source.update() for source in self.sources.values()]
        damage = [problem for source in self.sources.values() if (problem := source.damage())]
        if damage and not self.allow_truncated:
            raise Fault(f"{damage[0]}; {PARTIAL}")
        if any(changed):
            self._run = None
        return any(changed)

    def run(self) -> Run:
        """The run as read so far."""
        if self._run is None:
            notes = [note for source in self.sources.values() for note in (source.damage(), *source.notes()) if note]
            reading = Reading(sources=[str(path) for path in self.sources], notes=notes)
            curves, made = sessions.merge(self._sessions(), reading)
            self._run = Run(self.name, curves, made, reading, context_of(self.paths[0]))
        return self._run

    def _sessions(self) -> list[Session]:
        found = {path: source.sessions() for path, source in self.sources.items()}
        if len(self.paths) > 1:
            return [session for part in found.values() for session in part]
        events = [s for path, part in found.items() if isinstance(self.sources[path], EventSource) for s in part]
        metrics = [s for path, part in found.items() if isinstance(self.sources[path], JsonLinesSource) for s in part]
        tables = [s for part in found.values() for s in part if s not in events and s not in metrics]
        return self._pairing.paired(events, metrics) + tables if events and metrics else events + metrics + tables


def load(spec: str, allow_truncated: bool = False) -> Run:
    """Read a run once, unsampled. See RunReader for `spec` and errors.

    Raises:
        UsageFault: there is nothing to read, or no scalar in it.
    """
    reader = RunReader(spec, allow_truncated)
    reader.update()
    run = reader.run()
    if not run.curves:
        raise UsageFault(f"{spec} holds no scalar; read {len(reader.sources)} files: {_some(reader.sources)}")
    return run


def parse(spec: str) -> tuple[str, list[Path]]:
    """`[NAME=]PATH[,PATH...]` -> name and paths; a file with such a name wins over the syntax."""
    if Path(spec).exists():
        return _name_of(Path(spec)), [Path(spec)]
    name, separator, rest = spec.partition("=")
    if not separator:
        name, rest = "", spec
    paths = [_found(part) for part in rest.split(",") if part]
    if not paths:
        raise UsageFault(f"{spec!r} names no path; expected [NAME=]PATH[,PATH...]")
    return name or _name_of(paths[0]), paths


def _found(text: str) -> Path:
    for path in (Path(text), Path("runs") / text):
        if path.exists():
            return path
    raise UsageFault(f"no such run: {text} (looked for a path, then for runs/{text})")


def _name_of(path: Path) -> str:
    path = path.resolve()
    if path.name in ("tensorboard", "tensorboard_log") and path.parent.name:
        return path.parent.name
    return path.name.split(".")[0] if path.is_file() else path.name


def files_of(path: Path) -> list[tuple[Path, int | None]]:
    """The files of a run with the attempt's number where the folder tells it.

    Raises:
        UsageFault: the folder holds no run, or several.
    """
    if path.is_file():
        return [(path, None)]
    if _is_run_directory(path):
        run = RunDir(path)
        metrics = [(a.metrics, a.number) for a in run.attempts() if a.metrics.is_file()]
        events = [(file, None) for file in _events_in(run.tensorboard)] if run.tensorboard.is_dir() else []
        return metrics + events
    files = [(file, None) for file in _events_in(path)]
    if files:
        return files
    below = sorted({file.parent for file in path.rglob("*tfevents*") if file.is_file()})
    if len(below) == 1:
        return [(file, None) for file in _events_in(below[0])]
    if below:
        raise UsageFault(f"{path} holds {len(below)} TensorBoard runs; name one of {_some(below)}")
    logs = [(file, None) for file in sorted(path.glob("*.jsonl"))]
    if len(logs) == 1:
        return logs
    raise UsageFault(f"{path} holds no run: no event file (*tfevents*), attempts/*/metrics.jsonl or single .jsonl")


def _is_run_directory(path: Path) -> bool:
    run = RunDir(path)
    return run.journal.exists() or run.plan.exists() or any(a.metrics.exists() for a in run.attempts())


def _events_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*tfevents*") if file.is_file())


def context_of(path: Path) -> dict:
    """What a run directory knows beside its curves; empty for other sources."""
    file = path / "plan.json"
    try:
        tree = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _some(paths) -> str:
    names = [str(path) for path in paths]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
