"""Ablations: one recipe, some settings varied, each variant a run of its own, one page that compares them.

    RUNS/<name>/ablation.json   what is varied, and the name of each variant; the runs themselves say how far they are
    RUNS/<name>/<variant>/      a run directory, for bin/status, bin/logs, bin/compare
    RUNS/<name>/ablation.html   the page, written anew whenever a variant ends

Killed at any moment, the same command goes on: runs that are done stay done, runs that live are followed, runs that
died are resumed from their checkpoint.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from atlasrl import control, progress
from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import RunDir, write_atomically
from atlasrl.site import Site

SHORT = {
    "lr": "optimizer.learning_rate",
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "ep": "parallel.expert",
    "cp": "parallel.context",
    "n": "rollout.samples",
    "use_mbridge": "verl.actor_rollout_ref.actor.megatron.use_mbridge",
    "use_dist_checkpointing": "verl.actor_rollout_ref.actor.megatron.use_dist_checkpointing",
}
"""Names that people use for keys of the recipe."""

MOST = 64
POLL_SECONDS = 1.0
LIVE = ("submitted", "running", "restarting", "requeued")


@dataclass(frozen=True)
class Variant:
    """One run of an ablation. The first variant is the base: the first value of every key."""

    name: str
    values: dict[str, str]


@dataclass(frozen=True)
class Ablation:
    """What is asked for; ablation.json as it is."""

    recipe: str
    vary: dict[str, list[str]]
    design: str
    changes: list[str] = field(default_factory=list)
    nodes: int | None = None
    devices: int | None = None
    variants: list[Variant] = field(default_factory=list)

    def run(self, folder: Path, variant: Variant) -> RunDir:
        return RunDir(folder / variant.name)


def parse_vary(texts: list[str]) -> dict[str, list[str]]:
    """Key -> values of each `key=a,b`; commas inside brackets do not separate.

    >>> parse_vary(["lr=1e-6,2e-6", "verl.x=[1,2],[3]"])
    {'optimizer.learning_rate': ['1e-6', '2e-6'], 'verl.x': ['[1,2]', '[3]']}

    Raises:
        UsageFault: no values, the same key twice, or the same value twice.
    """
    vary: dict[str, list[str]] = {}
    for text in texts:
        key, separator, values = text.partition("=")
        key = SHORT.get(key, key)
        parts = re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[\]{}])+", values)
        if not key or not separator or len(parts) < 2 or len(set(parts)) < len(parts):
            raise UsageFault(
                f"--vary {text!r} is not KEY=VALUE,VALUE with two or more different values, such as lr=1e-6,2e-6"
            )
        if key in vary:
            raise UsageFault(f"--vary names {key} twice; give all its values at once")
        vary[key] = parts
    return vary


def variants(vary: dict[str, list[str]], design: str) -> list[Variant]:
    """The runs of a design: `one` changes one key at a time from the base, `grid` takes every combination.

    Raises:
        UsageFault: more runs than anybody means to start.
    """
    base = {key: values[0] for key, values in vary.items()}
    if design == "grid":
        chosen = [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]
    else:
        chosen = [base, *(base | {key: value} for key, values in vary.items() for value in values[1:])]
    if len(chosen) > MOST:
        raise UsageFault(f"{len(chosen)} runs are more than {MOST}; vary fewer values, or one factor at a time")
    return [Variant(_name(number, values, base), values) for number, values in enumerate(chosen)]


def _name(number: int, values: dict[str, str], base: dict[str, str]) -> str:
    changed = [f"{key.rpartition('.')[2]}-{value}" for key, value in values.items() if value != base[key]]
    words = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(changed) or "base")
    return f"{number:02d}-{words[:60]}"


def open_folder(folder: Path, asked: Ablation) -> Ablation:
    """Create ablation.json, or check that the one that is there asks for the same.

    Raises:
        UsageFault: the folder holds another ablation, or something else.
    """
    file = folder / "ablation.json"
    made = Ablation(**asdict(asked) | {"variants": variants(asked.vary, asked.design)})
    if file.is_file():
        known = load(folder)
        if known != made:
            raise UsageFault(
                f"{folder} holds another ablation (vary {known.vary}, {known.design}, {known.recipe}); repeat its own "
                "command to go on, or give another --name"
            )
        return known
    if folder.exists() and any(folder.iterdir()):
        raise UsageFault(f"{folder} is not empty and no ablation; give another --name")
    for variant in made.variants:  # a wrong key is told before the first run starts
        recipes.load(made.recipe, changes_of(made, variant))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(made), indent=1) + "\n")
    return made


def load(folder: Path) -> Ablation:
    """Read ablation.json. Raises UsageFault: there is none that can be read."""
    try:
        tree = json.loads((folder / "ablation.json").read_text())
        return Ablation(**tree | {"variants": [Variant(**each) for each in tree["variants"]]})
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise UsageFault(f"{folder} is no ablation: {problem}") from None


def changes_of(ablation: Ablation, variant: Variant) -> list[str]:
    """The `--set` changes of a variant."""
    return [*ablation.changes, *(f"{key}={value}" for key, value in variant.values.items())]


def work(folder: Path, ablation: Ablation, site: Site, parallel: int, tell: Callable[[str], None]) -> dict[str, str]:
    """Run every variant to its end, `parallel` at a time, and write the page.

    Returns:
        Variant name -> how it ended.

    Raises:
        Fault: another process works on this ablation.
    """
    lock = FileLock(folder / "ablation.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise Fault(f"another bin/ablate works on {folder}; wait for it, or end it with Ctrl-C") from None
    pause, seen, tried = threading.Event(), {}, set()  # never set: its wait is a poll that Ctrl-C interrupts
    try:
        while True:
            states = {variant.name: state(ablation.run(folder, variant)) for variant in ablation.variants}
            changed = {name: now for name, now in states.items() if seen.get(name) != now}
            for name, now in changed.items():
                tell(f"{name}: {now}")
            if any(now not in LIVE and now != "waiting" for now in changed.values()):
                _write_page(folder, ablation)
            seen = states
            alive = sum(now in LIVE for now in states.values())
            waiting = [v for v in ablation.variants if _wants_start(v, states, tried)]
            for variant in waiting[: max(0, parallel - alive)]:
                if _may_start(folder, ablation, variant):
                    tried.add(variant.name)
                    _start(folder, ablation, variant, site, tell)
            if not alive and not waiting:
                return states
            pause.wait(POLL_SECONDS)
    finally:
        lock.release()


def state(run: RunDir) -> str:
    """How far a variant is: waiting, or the state of its run."""
    return progress.of(run).state if run.plan.is_file() else "waiting"


def _wants_start(variant: Variant, states: dict[str, str], tried: set[str]) -> bool:
    """Not done, not alive, and not yet tried by this process: a variant that fails twice needs a person."""
    return states[variant.name] not in (*LIVE, "done") and variant.name not in tried


def _may_start(folder: Path, ablation: Ablation, variant: Variant) -> bool:
    """Runs that share a BF16 copy (model.cast_path) wait until the base has made it: two would write the same files."""
    base = ablation.variants[0]
    shared = recipes.load(ablation.recipe, changes_of(ablation, variant)).model.cast_path
    if variant == base or shared is None or (shared / "config.json").exists():
        return True
    run = ablation.run(folder, base)
    return run.plan.is_file() and progress.of(run).state not in LIVE


def _start(folder: Path, ablation: Ablation, variant: Variant, site: Site, tell: Callable[[str], None]) -> None:
    """Submit a variant: new, or from where it was left. A variant that cannot be planned does not end the others."""
    run = ablation.run(folder, variant)
    try:
        if not run.plan.is_file():
            recipe = recipes.load(ablation.recipe, changes_of(ablation, variant))
            plan = plans.make(recipe, site, run, nodes=ablation.nodes, devices_per_node=ablation.devices)
            control.create(plan, ablation.recipe)
            attempt, job = control.start(plan)
        else:
            plan, checkpoint, _ = control.resume(run, None if progress.of(run).checkpoint else 0, None)
            attempt, job = control.start(plan, checkpoint)
        tell(f"{variant.name}: job {job}, attempt {attempt.number}")
    except Fault as fault:
        tell(f"{variant.name}: error: {fault}")


def _write_page(folder: Path, ablation: Ablation) -> None:
    from atlasrl import ablation_page

    page = ablation_page.html(folder, ablation)
    if page is not None:
        write_atomically(folder / "ablation.html", page)
