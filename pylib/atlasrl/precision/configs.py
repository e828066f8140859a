"""Two effective configurations side by side, their differences ranked by what is known to move accuracy (axis 1)."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

import yaml

from atlasrl.precision.effective import Effective
from atlasrl.precision.normal import normalise

FILE = Path(__file__).with_name("effects.yaml")
LEVELS = ("strong", "some", "unknown", "rounding", "none")
TELLING = LEVELS[:3]
ABSENT = "(absent)"
PLACES = ("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "custom_reward_function.path")
"""Settings that name a place: what lies there counts, by content where the digests are known."""


@dataclass(frozen=True)
class Effect:
    """What a difference in keys of this kind does, why, and who says so."""

    level: str
    reason: str
    source: str


@dataclass(frozen=True)
class Difference:
    """One key on which two sides differ. `given` names the sides that set it; the others have verl's default."""

    key: str
    left: object
    right: object
    effect: Effect
    given: tuple[str, ...] = ()


@functools.cache
def rules() -> Mapping:
    """effects.yaml."""
    return yaml.safe_load(FILE.read_text())


def effect(key: str) -> Effect:
    """The known effect of a difference in `key`; the first pattern that fits decides."""
    for entry in rules()["effects"]:
        if any(fnmatchcase(key, pattern) for pattern in entry["keys"]):
            return Effect(entry["level"], entry["reason"], entry["source"])
    return Effect("unknown", "no effect is known of this key", "-")


def differences(left: Effective, right: Effective) -> list[Difference]:
    """What differs, the most telling first."""
    sides = [_facts(side) for side in (left, right)]
    found = []
    for key in sorted(sides[0].keys() | sides[1].keys()):
        values = [side.get(key, ABSENT) for side in sides]
        if values[0] == values[1] or _is_no_difference(key, values, left, right):
            continue
        given = tuple(side.name for side in (left, right) if _sets(side, key))
        found.append(Difference(key, *values, effect(key), given))
    return sorted(found, key=lambda each: (LEVELS.index(each.effect.level), not each.given, each.key))


def _facts(side: Effective) -> dict[str, object]:
    """Settings, environment, versions and files of a side under one kind of key."""
    facts = normalise(side.settings, rules())
    for prefix, part in (("env", side.environment), ("version", side.versions), ("files", side.files)):
        facts |= {f"{prefix}.{name}": str(each) for name, each in part.items()}
    return facts


def _is_no_difference(key: str, values: list[object], left: Effective, right: Effective) -> bool:
    """Whether unequal values say nothing: one side does not know, or both name a place with the same content."""
    if ABSENT in values:
        part = {"version": "versions", "files": "files", "env": "environment"}.get(key.partition(".")[0])
        if part in ("versions", "files"):
            return not (getattr(left, part) and getattr(right, part))
        if part is None:
            has, other = (left, values[0]) if values[1] == ABSENT else (right, values[1])
            return other is None or not _sets(has, key)  # another backend's or version's default says nothing
    if key in PLACES:
        roles = {"custom_reward_function.path": "reward", "actor_rollout_ref.model.path": "model/"}
        role = roles.get(key, key.removeprefix("data.").removesuffix("_files") + "/")
        known = [{n: d for n, d in side.files.items() if n.startswith(role)} for side in (left, right)]
        if all(known):
            return True  # the digests of the files are compared under keys of their own
        return ABSENT not in values and all(map(_named_alike, *map(_listed, values)))
    return False


def _sets(side: Effective, key: str) -> bool:
    """Whether somebody set the key, under any of its spellings, or a section that holds it."""
    spellings = (key, *rules()["spellings"].get(key, ()))
    return any(each == name or each.startswith(f"{name}.") for each in spellings for name in side.given)


def _listed(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _named_alike(left: str, right: str) -> bool:
    return PurePath(left).name == PurePath(right).name


def telling(found: list[Difference]) -> list[Difference]:
    """Those that can move accuracy."""
    return [each for each in found if each.effect.level in TELLING]


def text(left: Effective, right: Effective, found: list[Difference], every: bool = False, width: int = 100) -> str:
    """The differences for a person; without `every`, those that can move accuracy."""
    lines = [f"left   {left.name}", f"right  {right.name}"]
    shown = found if every else telling(found)
    for level in LEVELS:
        group = [each for each in shown if each.effect.level == level]
        if group:
            lines += ["", f"{level} ({len(group)})"]
        for each in group:
            lines.append(f"  {each.key}: {_short(each.left)} | {_short(each.right)}{_origin(each)}")
            lines.append(f"      {each.effect.reason} [{each.effect.source}]")
    hidden = [each.effect.level for each in found if each not in shown]
    if hidden:
        counts = ", ".join(f"{hidden.count(level)} {level}" for level in LEVELS if level in hidden)
        lines += ["", f"not shown: {counts}; --all shows them"]
    lines += [f"note: {side.name}: {note}" for side in (left, right) for note in side.notes]
    count = len(telling(found))
    lines.append(f"{count} differences can move accuracy" if count else "no difference that can move accuracy")
    out = io.StringIO()
    for line in lines:
        out.write(line + "\n")
    return out.getvalue().rstrip("\n")


def _short(value: object) -> str:
    shown = str(value)
    return shown if len(shown) <= 60 else f"{shown[:28]}…{shown[-28:]}"


def _origin(each: Difference) -> str:
    return "" if len(each.given) != 1 else f"  (set by {each.given[0]} only)"


def as_json(found: list[Difference]) -> list[dict]:
    """The differences as data."""
    return [
        {
            "key": each.key,
            "left": each.left,
            "right": each.right,
            "level": each.effect.level,
            "reason": each.effect.reason,
            "source": each.effect.source,
            "set_by": list(each.given),
        }
        for each in found
    ]
