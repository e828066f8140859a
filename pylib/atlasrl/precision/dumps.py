"""Read dumps of a stack: this project's own, and those of Ascend's msprobe (PyPI mindstudio-probe)."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import read_json_lines

MSPROBE_CALL = re.compile(r"Module\.(?:module\.)?(.*)\.(\w+)\.forward\.(\d+)")


@dataclass(frozen=True)
class Record:
    """One tensor: its statistics, and where its slice lies (None: there is none)."""

    module: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    mean: float
    low: float
    high: float
    bad: int = 0
    """NaN and infinite elements"""
    line: int | None = None


@dataclass
class Call:
    """One call of a module, with the calls inside it, in order. `choice` is the digest of integers that it gave out."""

    module: str
    kind: str
    inputs: list[Record] = field(default_factory=list)
    outputs: list[Record] = field(default_factory=list)
    children: list[Call] = field(default_factory=list)
    choice: str | None = None


@dataclass
class Dump:
    """A whole dump. `roots` are the outermost calls; `gradients` stand in the order of backward, `weights` by name."""

    folder: Path
    facts: dict
    roots: list[Call]
    gradients: list[Record] = field(default_factory=list)
    weights: dict[str, Record] = field(default_factory=dict)

    def sample(self, record: Record):
        """The slice of a record as a float32 tensor; None where the dump keeps none."""
        if record.line is None:
            return None
        name = str(record.line)
        if name not in self._parts:
            raise Fault(f"{self.folder} lacks the slice of {record.module}: a samples file is missing")
        return self._parts[name].get_tensor(name)

    @functools.cached_property
    def _parts(self) -> dict:
        """Name of each slice -> the open file that holds it."""
        from safetensors import SafetensorError, safe_open

        try:
            files = [safe_open(file, "pt") for file in sorted(self.folder.glob("samples-*.safetensors"))]
            return {name: file for file in files for name in file.keys()}  # noqa: SIM118  no mapping
        except (SafetensorError, OSError) as problem:
            raise Fault(f"{self.folder}: a samples file is damaged ({problem}); copy the dump again") from None


def read(folder: Path) -> Dump:
    """Read a dump of either kind.

    Raises:
        UsageFault: the folder holds none.
        Fault: it is damaged.
    """
    file = folder / "dump.json"
    try:
        facts = json.loads(file.read_text())
    except OSError:
        raise UsageFault(f"{folder} is no dump: it has no dump.json (a dump that was cut off has none)") from None
    except ValueError as problem:
        raise Fault(f"{file} is damaged: {problem}") from None
    try:
        return _of_msprobe(folder, facts) if "data" in facts else _of_ours(folder, facts)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as problem:
        raise Fault(f"{folder} is no dump that can be read ({type(problem).__name__}: {problem})") from None


def _of_ours(folder: Path, facts: dict) -> Dump:
    calls: dict[int, Call] = {}
    roots: list[Call] = []
    gradients: list[Record] = []
    weights: dict[str, Record] = {}
    for entry in read_json_lines(folder / "index.jsonl"):
        if entry["kind"] == "grad":
            gradients.append(_record(entry, entry["module"]))
        elif entry["kind"] == "weight":
            weights[entry["module"]] = _record(entry, entry["module"])
        elif entry["kind"] == "call":
            call = Call(entry["module"], entry["type"])
            if "shape" in entry:
                call.inputs.append(_record(entry, entry["module"]))
            calls[entry["call"]] = call
            parent = calls.get(entry["parent"])
            (parent.children if parent else roots).append(call)
        elif (call := calls.get(entry["call"])) is not None:
            call.outputs.append(_record(entry, call.module))
            call.choice = entry.get("choice")
    return Dump(folder, facts, roots, gradients, weights)


def _record(entry: dict, module: str) -> Record:
    return Record(
        module,
        tuple(entry["shape"]),
        entry["dtype"],
        entry["norm"],
        entry["mean"],
        entry["min"],
        entry["max"],
        entry["nan"] + entry["inf"],
        entry["line"],
    )


def _of_msprobe(folder: Path, facts: dict) -> Dump:
    """dump.json of level L0 with task statistics; construct.json says which call is inside which."""
    parents = json.loads((folder / "construct.json").read_text()) if (folder / "construct.json").is_file() else {}
    calls: dict[str, Call] = {}
    weights: dict[str, Record] = {}
    for name, entry in facts["data"].items():
        if match := MSPROBE_CALL.fullmatch(name):
            given = [*entry.get("input_args", []), *entry.get("input_kwargs", {}).values()]
            inputs = [_of_statistics(each, match[1]) for each in _floating(given)][:1]
            outputs = [_of_statistics(each, match[1]) for each in _floating(entry.get("output", []))]
            calls[name] = Call(match[1], match[2], inputs, outputs)
            for part, value in entry.get("parameters", {}).items():
                weights |= {f"{match[1]}.{part}": _of_statistics(each, match[1]) for each in _floating(value)}
    roots = []
    for name, call in calls.items():
        parent = parents.get(name)
        parent = parent[0] if isinstance(parent, list) else parent
        (calls[parent].children if parent in calls else roots).append(call)
    return Dump(folder, {"kind": "msprobe"} | {k: v for k, v in facts.items() if k != "data"}, roots, [], weights)


def _floating(value) -> list[dict]:
    if isinstance(value, dict):
        floating = "float" in str(value.get("dtype", "")) and value.get("Norm") is not None
        return [value] if floating else [] if "type" in value else [e for v in value.values() for e in _floating(v)]
    return [each for part in value for each in _floating(part)] if isinstance(value, list) else []


def _of_statistics(entry: dict, module: str) -> Record:
    numbers = [entry[name] for name in ("Norm", "Mean", "Min", "Max")]
    bad = sum(not isinstance(each, (int, float)) or each != each or abs(each) == float("inf") for each in numbers)
    return Record(
        module,
        tuple(entry["shape"]),
        entry["dtype"].removeprefix("torch."),
        *(float(each) if isinstance(each, (int, float)) else float("nan") for each in numbers),
        bad,
    )
