"""The effective configuration of a run: every setting with its value, the environment, the versions, the files.

A run of ours writes it down when it starts (`record`). Where it did not, and for a launch script of another team, it is
put together from verl's own YAML and the overrides; then versions and files stay unknown.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from atlasrl.errors import UsageFault
from atlasrl.precision import shell
from atlasrl.rundir import AttemptDir, RunDir, write_atomically
from atlasrl.schema import read_yaml
from atlasrl.trainer.prompts import files_digest

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^{}]*|\{\}))?\}")
BASES = {False: "_generated_ppo_trainer.yaml", True: "_generated_ppo_megatron_trainer.yaml"}
"""verl's composed defaults, without and with Megatron."""

DAPO_DEFAULTS = {"algorithm.filter_groups.enable": False}
"""What recipe/dapo adds to verl's YAML, where only its launch script is at hand."""

FROM_RECIPE = {
    "algorithm.filter_groups.enable": "dapo.dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": "dapo.max_gen_batches",
    "data.gen_batch_size": "dapo.gen_batch_size",
}
"""Settings that this project's trainer takes from the recipe: verl's own trainer has no key for them."""

PACKAGES = (
    "torch", "torch-npu", "verl", "vllm", "vllm-ascend", "sglang", "megatron-core", "mindspeed", "mbridge",
    "transformer-engine", "flash-attn", "transformers", "tokenizers", "numpy", "ray", "math-verify", "triton",
)  # fmt: skip
VARIABLES = re.compile(
    r"(HCCL|LCCL|ASCEND|ATB|NCCL|GLOO|CUDA|CUBLAS|CUDNN|NVTE|VLLM|SGLANG|TORCH|PYTORCH|OMP|MKL|TASK_QUEUE|CLOSE_MATMUL"
    r"|PYTHONHASHSEED|ATLASRL_WITHOUT|VERL|TRANSFORMERS|TOKENIZERS|HF_HUB|TRITON|MINDSPEED|INF_NAN|COMBINED)"
)
SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|KEY)(_|$)")
TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What of a model folder decides how text becomes tokens, and how the weights are used."""


@dataclass
class Effective:
    """One side of a comparison. `given` are the keys that somebody set; the others are verl's defaults."""

    name: str
    settings: dict[str, object]
    environment: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Role -> digest of the content: reward, train, val, model/tokenizer.json …"""
    given: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def record(attempt: AttemptDir, config: Mapping, recipe: Mapping) -> None:
    """Write effective.json of an attempt: verl's resolved config and what else decides numbers.

    Args:
        config: the resolved configuration as plain containers.
        recipe: the recipe as a tree.
    """
    settings = dict(flat(config)) | of_recipe(recipe)
    tree = {
        "settings": settings,
        "environment": {n: v for n, v in sorted(os.environ.items()) if VARIABLES.match(n) and not SECRET.search(n)},
        "versions": versions(),
        "files": digests(settings),
    }
    write_atomically(path(attempt), json.dumps(tree, indent=1, default=str) + "\n")


def path(attempt: AttemptDir) -> Path:
    return attempt.path / "effective.json"


def load(source: str) -> Effective:
    """One side, from a run directory, a launch script (*.sh), or a resolved config (*.yaml, *.json).

    Raises:
        UsageFault: neither, or unreadable.
    """
    place = Path(source)
    if place.is_dir():
        return _of_run(RunDir(place))
    if not place.is_file():
        raise UsageFault(f"{source} is neither a run directory nor a file (launch script .sh, config .yaml or .json)")
    if place.suffix in (".yaml", ".yml", ".json"):
        return _of_config(place)
    return _of_script(place)


def versions() -> dict[str, str]:
    """Package -> installed version, of the packages that decide numbers, and Python's."""
    import platform

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for release in Path("/usr/local/Ascend/ascend-toolkit/latest").glob("*-linux/ascend_toolkit_install.info"):
        found["cann"] = dict(re.findall(r"(\w+)=(.*)", release.read_text())).get("version", "unknown")
    return found


def digests(settings: Mapping[str, object]) -> dict[str, str]:
    """Role -> sixteen hex digits of each file that decides what is learned, by content: two paths may hold one file."""
    model = Path(str(settings.get("actor_rollout_ref.model.path") or ""))
    chosen = {f"model/{name}": model / name for name in TEXT_FILES}
    chosen["reward"] = Path(str(settings.get("custom_reward_function.path") or ""))
    for role in ("train", "val"):
        files = settings.get(f"data.{role}_files") or []
        chosen |= {f"{role}/{i}": Path(str(f)) for i, f in enumerate([files] if isinstance(files, str) else files)}
    return {role: digest for role, file in chosen.items() if (digest := _digest(file)) is not None}


def flat(tree: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of every leaf; an empty mapping is a leaf, `_target_` is none."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield prefix + str(key), value


def of_recipe(recipe: Mapping) -> dict[str, object]:
    """The settings that verl's config does not hold."""
    found = {}
    for key, source in FROM_RECIPE.items():
        section, _, name = source.partition(".")
        found[key] = recipe.get(section, {}).get(name)
    if found["algorithm.filter_groups.enable"]:
        found["algorithm.filter_groups.metric"] = "acc"  # what trainer/scoring.accuracies looks at
    return found


def _of_run(run: RunDir) -> Effective:
    if not run.plan.is_file():
        raise UsageFault(f"{run.path} is no run: it has no plan.json; give a run directory or a launch script")
    plan = json.loads(run.plan.read_text())
    given = {override["key"].lstrip("+") for override in plan["overrides"]}
    for attempt in reversed(run.attempts()):
        if path(attempt).is_file():
            return Effective(run.name, given=given, **json.loads(path(attempt).read_text()))
    side = _composed(
        run.name,
        {override["key"].lstrip("+"): override["value"] for override in plan["overrides"]},
        plan["recipe"]["backend"] == "megatron",
    )
    side.settings |= of_recipe(plan["recipe"])
    side.environment, side.files = plan["environment"], digests(side.settings)
    side.notes.append(
        "it wrote no effective.json: versions unknown, verl's defaults as installed here, files as of now"
    )
    return side


def _of_script(file: Path) -> Effective:
    launch = shell.read(file)
    texts = " ".join(launch.overrides)
    megatron = "megatron" in (launch.config_name or "") or ".megatron." in texts
    side = _composed(file.name, {key: value_of(text) for key, text in launch.overrides.items()}, megatron)
    if "dapo" in (launch.config_name or "dapo_trainer"):
        side.settings = DAPO_DEFAULTS | side.settings
    side.environment = launch.environment
    side.notes += launch.notes
    return side


def _of_config(file: Path) -> Effective:
    try:
        tree = read_yaml(file.read_text())
    except Exception as problem:  # PyYAML raises ValueError and its own kinds on hostile input
        raise UsageFault(f"{file} is not YAML: {' '.join(str(problem).split())[:200]}") from None
    if not isinstance(tree, dict):
        raise UsageFault(f"{file} holds no mapping; the resolved config of a verl run is one")
    settings = dict(flat(tree))
    if "trainer.nnodes" not in settings:
        raise UsageFault(f"{file} is no config of verl: it has no trainer.nnodes")
    return Effective(file.name, settings, given=set(settings))


def _composed(name: str, overrides: dict[str, object], megatron: bool) -> Effective:
    """verl's YAML with overrides. Without an installed verl the defaults stay unknown."""
    said = dict(flat(overrides))
    base = _defaults(BASES[megatron])
    notes = [] if base else ["verl is not installed: its defaults are unknown"]
    settings = base | said
    resolved = {key: each if key in said else _resolved(each, key, settings) for key, each in settings.items()}
    return Effective(name, resolved, given=set(overrides), notes=notes)


@functools.cache
def _defaults(file: str) -> dict[str, object]:
    """verl's composed YAML, flat and with its references; empty where no verl is installed."""
    found = importlib.util.find_spec("verl")
    path = Path(found.origin).parent / "trainer" / "config" / file if found else None
    if path is None or not path.is_file():
        return {}
    return dict(flat(yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))))


def _resolved(value: object, key: str, settings: Mapping[str, object], depth: int = 8) -> object:
    """The value with its references `${key}`, `${.sibling}` and `${oc.select:key,default}` followed."""
    if not isinstance(value, str) or "${" not in value or not depth:
        return value

    def target(found: re.Match) -> object:
        name = key.rpartition(".")[0] + found[1] if found[1].startswith(".") else found[1]
        if name in settings:
            return _resolved(settings[name], name, settings, depth - 1)
        return value_of(found[2] or "null")

    whole = REFERENCE.fullmatch(value)
    return target(whole) if whole else REFERENCE.sub(lambda found: str(target(found)), value)


def value_of(text: str) -> object:
    """The value of an override in hydra's grammar; a text that is no YAML stays a text.

    >>> value_of("['a', 'b']"), value_of("1e-6"), value_of("{enable:True,len:4}"), value_of("")
    (['a', 'b'], 1e-06, {'enable': True, 'len': 4}, '')
    """
    if text.startswith("{"):
        text = re.sub(r"(?<=[\w'\"]):(?=\S)", ": ", text)
    try:
        return "" if text == "" else read_yaml(text)
    except Exception:  # any text may be a value
        return text


def _digest(file: Path) -> str | None:
    """Of a file's content; None where there is no file that can be read."""
    try:
        return files_digest([str(file)])
    except OSError:
        return None
