"""Training checkpoints of verl, and of runs that seal them with a COMPLETE manifest: which steps are whole.

    <root>/latest_checkpointed_iteration.txt       verl's tracker
    <root>/global_step_N/data.pt                   position in the prompts
    <root>/global_step_N/COMPLETE                  manifest: step, every file with its size; written last
    <root>/global_step_N/actor/…                   one of three layouts:
        dist_ckpt/ huggingface/                    Megatron, verl up to 0.7
        ckpt_contents.json model/ optimizer/ extra/   Megatron, layout v2; the manifest is written last (RFC verl#5630)
        model_world_size_W_rank_R.pt …             FSDP

Nothing here unpickles anything: files are counted and measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.files import human
from ckpt_tools.header import parse_json
from ckpt_tools.report import Report
from ckpt_tools.verify import verify

TRACKER, MANIFEST, CONTENTS, DATA = "latest_checkpointed_iteration.txt", "COMPLETE", "ckpt_contents.json", "data.pt"
STEP = re.compile(r"global_step_(\d{1,12})")
FSDP_FILE = re.compile(r"(?P<what>model|optim|extra_state)_world_size_(?P<world>\d{1,7})_rank_(?P<rank>\d{1,7})\.pt")
AGAIN = "resume from another step; `ckpt prune` can remove this one"


@dataclass(frozen=True, slots=True)
class Step:
    """One `global_step_N` folder. `problems` is empty when it is whole; `sealed` when a COMPLETE manifest says so."""

    path: Path
    number: int
    layout: str
    sealed: bool
    problems: tuple[str, ...]
    size: int


def is_training_folder(folder: Path) -> bool:
    """True for the root of training checkpoints, or for one step of them."""
    return bool(STEP.fullmatch(folder.name)) or any(STEP.fullmatch(p.name) for p in folder.iterdir() if p.is_dir())


def survey(root: Path) -> list[Step]:
    """All steps of a checkpoint root, newest first. A link is listed with a problem and never followed.

    Raises:
        UsageFault: no such folder.
    """
    if not root.is_dir():
        raise UsageFault(f"{root}: no such folder; give the folder that holds global_step_*")
    numbered = [(int(match[1]), path) for path in root.iterdir() if (match := STEP.fullmatch(path.name))]
    return [inspect(path) for _, path in sorted(numbered, reverse=True)]


def inspect(path: Path) -> Step:
    """Look at one step: which layout, and what is missing from it."""
    number = int(STEP.fullmatch(path.name)[1])
    if path.is_symlink() or not path.is_dir():
        return Step(path, number, "none", False, ("is a link or a file, not a folder",), 0)
    files = {p.relative_to(path).as_posix(): p.lstat().st_size for p in path.rglob("*") if p.is_file()}
    layout = layout_of(files)
    problems: list[str] = []
    sealed = MANIFEST in files
    if sealed:
        problems += _against_manifest(path, number, files)
    problems += {"v2": _check_v2, "v1": _check_v1, "fsdp": _check_fsdp}.get(layout, _check_nothing)(path, files)
    if not files.get(DATA):
        problems.append(f"{DATA} is {'empty' if DATA in files else 'missing'}: the position in the prompts is lost")
    return Step(path, number, layout, sealed, tuple(dict.fromkeys(problems)), sum(files.values()))


def layout_of(files: dict[str, int]) -> str:
    """v2, v1 or fsdp, by the files of the actor; "none" when it has none."""
    if f"actor/{CONTENTS}" in files or any(f.startswith(("actor/model/", "actor/optimizer/")) for f in files):
        return "v2"
    if any(f.startswith(("actor/dist_ckpt/", "actor/huggingface/")) and not _is_fsdp(files) for f in files):
        return "v1"
    return "fsdp" if _is_fsdp(files) else "none"


def _is_fsdp(files: dict[str, int]) -> bool:
    return any(FSDP_FILE.fullmatch(PurePosixPath(f).name) for f in files if f.startswith("actor/"))


def _against_manifest(path: Path, number: int, files: dict[str, int]) -> list[str]:
    """Compare the files with the COMPLETE manifest: presence and size of each."""
    try:
        content, _ = parse_json((path / MANIFEST).read_bytes(), MANIFEST)
        listed = {str(name): int(size) for name, size in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"its {MANIFEST} manifest is damaged"]
    problems = [] if content.get("step") == number else [f"its {MANIFEST} is that of step {content.get('step')}"]
    for name, size in listed.items():
        if name not in files:
            problems.append(f"{name} is missing ({MANIFEST} lists it)")
        elif files[name] != size:
            problems.append(f"{name} has {files[name]} bytes, {size} expected")
    return problems


def _check_nothing(path: Path, files: dict[str, int]) -> list[str]:
    return ["actor/ holds no checkpoint of a known layout: the save was cut off"]


def _check_dist(folder: str, files: dict[str, int]) -> list[str]:
    """A torch_dist folder needs its .metadata (written last) and non-empty data files."""
    inside = {f: size for f, size in files.items() if f.startswith(f"{folder}/")}
    data = [size for f, size in inside.items() if f.endswith(".distcp")]
    if not inside:
        return [f"{folder}/ is missing"]
    if not files.get(f"{folder}/.metadata"):
        return [f"{folder}/.metadata is missing: the save was cut off"]
    if not data or not all(data):
        return [f"{folder}/ has {'empty' if data else 'no'} .distcp files"]
    return []


def _check_v1(path: Path, files: dict[str, int]) -> list[str]:
    problems = _check_dist("actor/dist_ckpt", files)
    return problems + _check_weights(path / "actor" / "huggingface", files, "actor/huggingface")


def _check_weights(folder: Path, files: dict[str, int], name: str) -> list[str]:
    """Verify weights in Hugging Face form like any checkpoint; a folder with config and tokenizer only is fine."""
    if not any(f.startswith(f"{name}/") and f.endswith((".safetensors", ".safetensors.index.json")) for f in files):
        return []
    try:
        return [f"{name}: {finding.where}: {finding.problem}" for finding in verify(folder).errors]
    except Fault as fault:
        return [str(fault)]


def _check_v2(path: Path, files: dict[str, int]) -> list[str]:
    """Layout v2: the manifest names a folder per content, and is written when all of them are."""
    try:
        content, _ = parse_json((path / "actor" / CONTENTS).read_bytes(), CONTENTS)
        places = {str(key): str(entry["path"]) for key, entry in content["contents"].items()}
    except FileNotFoundError:
        return [f"actor/{CONTENTS} is missing: the save was cut off"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"actor/{CONTENTS} is damaged"]
    problems = []
    for key, place in places.items():
        relative = PurePosixPath(place)
        if relative.is_absolute() or ".." in relative.parts:
            problems.append(f"actor/{CONTENTS} places {key} outside of the checkpoint: {place}")
        elif relative.name == "huggingface":
            if not any(f.startswith(f"actor/{relative}/") and f.endswith(".safetensors") for f in files):
                problems.append(f"actor/{relative} has no weights")
            problems += _check_weights(path / "actor" / relative, files, f"actor/{relative}")
        elif relative.name == "dist_ckpt":
            problems += _check_dist(f"actor/{relative}", files)
        elif not any(f == f"actor/{relative}" or f.startswith(f"actor/{relative}/") for f in files):
            problems.append(f"actor/{relative} ({key}) is missing")
    return problems


def _check_fsdp(path: Path, files: dict[str, int]) -> list[str]:
    """Every rank's model file must be there, of one world size; optimizer and extra state for all ranks or for none."""
    matches = [(m, size) for f, size in files.items() if (m := FSDP_FILE.fullmatch(PurePosixPath(f).name))]
    worlds = {int(m["world"]) for m, _ in matches}
    if len(worlds) != 1:
        return [f"files of several world sizes: {', '.join(map(str, sorted(worlds)))}"]
    (world,) = worlds
    problems = []
    for what in ("model", "optim", "extra_state"):
        ranks = {int(m["rank"]) for m, size in matches if m["what"] == what and size}
        if (ranks or what == "model") and len(ranks) != world:
            problems.append(f"actor/{what}_world_size_{world}: {len(ranks)} of {world} ranks")
    return problems


def verify_training(folder: Path) -> Report:
    """Check a root of training checkpoints (each step, and verl's tracker), or one step."""
    if STEP.fullmatch(folder.name):
        report, steps = Report(str(folder)), [inspect(folder)]
    else:
        report, steps = Report(str(folder)), survey(folder)
        _check_tracker(folder, steps, report)
    for step in steps:
        state = "whole" if not step.problems else "broken"
        seal = "sealed" if step.sealed else f"no {MANIFEST} manifest"
        report.facts[step.path.name] = f"{state}, {step.layout}, {human(step.size)}, {seal}"
        for problem in step.problems:
            report.error("training_step", step.path.name, problem, AGAIN)
    return report


def _check_tracker(root: Path, steps: list[Step], report: Report) -> None:
    """verl resumes from where its tracker points, so it must point to a whole step."""
    path = root / TRACKER
    whole = {step.number for step in steps if not step.problems}
    if not path.is_file():
        if steps:
            problem = "verl's tracker is missing; resume_mode=auto would start from scratch"
            report.warn("tracker", TRACKER, problem, "resume by path, or write the newest whole step into it")
        return
    text = path.read_bytes()[:64].decode(errors="replace").strip()
    if not text.isdigit() or int(text) not in whole:
        what = f"points to step {text}, which is not whole" if text.isdigit() else f"holds {text!r}, not a step"
        newest = max(whole, default=None)
        report.error("tracker", TRACKER, what, f"the newest whole step is {newest}")
    elif int(text) != max(whole):
        problem = f"points to step {text}, the newest whole step is {max(whole)}"
        report.warn("tracker", TRACKER, problem, "verl resumes from the older one")
