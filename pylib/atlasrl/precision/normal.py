"""Settings of different teams in one form: canonical keys, plain values, defaults and units worked out. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

NAMES = {
    **{name: name for name in ("bfloat16", "float16", "float32")},
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    "adamw": "adam",  # Megatron's adam decouples weight decay, as torch's AdamW does
}
NOTHING = (None, "", "null", "None", "???", [], {})

OPTIM = "actor_rollout_ref.actor.optim"
ACTOR = "actor_rollout_ref.actor"


def normalise(settings: Mapping[str, object], rules: Mapping) -> dict[str, object]:
    """The settings by canonical key, without those that nobody reads.

    Args:
        rules: `spellings`, `follows` and `inert` of effects.yaml.
    """
    plain = {key: value(each) for key, each in settings.items()}
    named = _spelled(plain, rules["spellings"])
    derived = _derived(named)
    said = {key: each for key, each in derived.items() if key not in rules["follows"]} | {
        key: derived[key]
        for key, source in rules["follows"].items()
        if key in derived and derived[key] != derived.get(source, derived[key])
    }
    return _alive(said, rules["inert"])


def value(raw: object) -> object:
    """A plain value: numbers as numbers, one-element lists as their element, dtypes by one name, nothing as None.

    >>> value("1e-6"), value("torch.bfloat16"), value(["a"]), value("True"), value(2.0), value("null")
    (1e-06, 'bfloat16', 'a', True, 2, None)
    """
    if isinstance(raw, list) and len(raw) == 1:
        raw = raw[0]
    if isinstance(raw, list):
        return [value(each) for each in raw]
    if raw in NOTHING:
        return None
    if isinstance(raw, str):
        text = raw.strip()
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        number = _number(text)
        return NAMES.get(text.lower().removeprefix("torch."), text) if number is None else number
    return _whole(raw) if isinstance(raw, float) else raw


def _number(text: str) -> int | float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return _whole(number) if math.isfinite(number) else None


def _whole(number: float) -> int | float:
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else number


def _spelled(settings: dict[str, object], spellings: Mapping[str, list[str]]) -> dict[str, object]:
    """Every setting under its canonical key. An old spelling counts only where it is set: its default is no opinion."""
    named = dict(settings)
    for canonical, others in spellings.items():
        found = [named.pop(key) for key in (*others, canonical) if key in named]
        if found:
            named[canonical] = next((each for each in found if each is not None), None)
    return named


def _derived(settings: dict[str, object]) -> dict[str, object]:
    """Defaults that verl works out itself, and ratios as the counts they stand for."""
    known = dict(settings)
    for side in ("low", "high"):
        if known.get(f"{ACTOR}.clip_ratio_{side}") is None and f"{ACTOR}.clip_ratio" in known:
            known[f"{ACTOR}.clip_ratio_{side}"] = known[f"{ACTOR}.clip_ratio"]
    if f"{ACTOR}.clip_ratio_low" in known:
        known.pop(f"{ACTOR}.clip_ratio", None)
    if known.get("data.gen_batch_size") is None and "data.train_batch_size" in known:
        known["data.gen_batch_size"] = known["data.train_batch_size"]
    steps, ratio = known.get("trainer.total_training_steps"), known.pop(f"{OPTIM}.lr_warmup_steps_ratio", None)
    warmup = known.get(f"{OPTIM}.lr_warmup_steps")
    if warmup in (None, -1) and isinstance(ratio, (int, float)):
        known_end = isinstance(steps, (int, float))
        known[f"{OPTIM}.lr_warmup_steps"] = int(ratio * (steps if known_end else 0))
        if ratio and not known_end:
            known[f"{OPTIM}.lr_warmup_steps"] = f"{ratio} of all steps"
    known.pop(f"{OPTIM}.total_training_steps", None)  # verl fills it in from trainer.total_training_steps
    for name in ("expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"):
        key = f"{ACTOR}.megatron.{name}"
        if key in known and known[key] is None:
            known[key] = known.get(f"{ACTOR}.megatron.tensor_model_parallel_size", 1) if "expert" in name else 1
    for key in [key for key in known if key.endswith(".top_k")]:
        known[key] = -1 if known[key] in (0, None) else known[key]  # 0 is off for Transformers, -1 for vLLM
    return known


def _alive(settings: dict[str, object], inert: list[Mapping]) -> dict[str, object]:
    """Without the keys that nobody reads, judged by the switches as they are."""
    dead: set[str] = set()
    for rule in inert:
        switches = rule["while"]
        if all(key in settings and settings[key] == wanted for key, wanted in switches.items()):
            dead |= {k for k in settings if k not in switches and any(fnmatchcase(k, p) for p in rule["keys"])}
    return {key: each for key, each in settings.items() if key not in dead}
