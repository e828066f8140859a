"""The recipe: what to train. A YAML file checked against this schema before anything starts.

Relative paths in a recipe are relative to the recipe's own folder; paths given with `--set` are relative to the
current directory. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from atlasrl.errors import UsageFault

RECIPES = Path(__file__).resolve().parents[2] / "jobs" / "recipes"

PathLike = Annotated[Path, Field(json_schema_extra={"path": True})]
Scalar = bool | int | float | str | None


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InputScript(Section):
    """Makes the recipe's inputs once per run, from what is installed: `python SCRIPT --out RUN/input`."""

    script: PathLike


class ModelInput(Section):
    """The checkpoint to start from: a Hugging Face folder of safetensors, BF16 or FP8."""

    path: PathLike | None = Field(None, description="folder; absent when `inputs` makes RUN/input/model")
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    trust_remote_code: bool = False


class Data(Section):
    """Prompts in verl's parquet schema, and the rule that scores an answer."""

    train: PathLike | None = Field(None, description="parquet; absent when `inputs` makes RUN/input/train.parquet")
    val: PathLike | None = None
    reward: PathLike | None = Field(None, description="Python file with compute_score(); absent: verl's own rules")
    max_prompt_tokens: PositiveInt = 2048
    max_response_tokens: PositiveInt = 8192
    shuffle: bool = True


class Parallel(Section):
    """How the model is split. Products are checked against nodes × devices."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt = 1
    context: PositiveInt = 1
    first_stage_layers: PositiveInt | None = None
    last_stage_layers: PositiveInt | None = None
    distributed_optimizer: bool = True
    recompute: Literal["none", "full"] = "none"
    offload: bool = Field(False, description="keep parameters, gradients and optimizer state on the host between phases")


class Rollout(Section):
    """How answers are generated."""

    engine: Literal["vllm", "cpu"] = "vllm"
    samples: PositiveInt = Field(16, description="answers per prompt")
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    tensor: PositiveInt = 1
    expert: PositiveInt = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6


class Overlong(Section):
    """Soft punishment of answers that run into the length limit (DAPO, arXiv 2503.14476, section 3.4)."""

    buffer_tokens: PositiveInt = 4096
    penalty: PositiveFloat = 1.0


class Dapo(Section):
    """Decoupled clip and dynamic sampling."""

    train_batch_size: PositiveInt = Field(32, description="prompts per training step")
    mini_batch_size: PositiveInt = Field(32, description="prompts per optimizer step")
    gen_batch_size: PositiveInt | None = Field(None, description="prompts per generation; default train_batch_size")
    micro_batch_size: PositiveInt = Field(1, description="answers per device and forward pass")
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    dynamic_sampling: bool = True
    max_gen_batches: PositiveInt = 10
    when_exhausted: Literal["stop", "fill"] = Field(
        "stop", description="at max_gen_batches: stop, or fill up with groups whose advantage is zero"
    )
    overlong: Overlong | None = Overlong()


class Optimizer(Section):
    learning_rate: PositiveFloat = 1e-6
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_grad: PositiveFloat = 1.0


class Checkpoint(Section):
    save_every: PositiveInt = 10
    keep: PositiveInt = Field(2, description="complete checkpoints kept on disk; the newest is never removed")


class Recipe(Section):
    """What to train. `nodes` and `devices_per_node` are defaults that the command line may change."""

    description: str = ""
    device: Literal["npu", "cuda", "cpu"] = "npu"
    backend: Literal["megatron", "fsdp2"] = "megatron"
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 8
    steps: PositiveInt = 100
    validate_every: Annotated[int, Field(ge=0)] = Field(0, description="steps between validations; 0: never")
    seed: int = 1
    inputs: InputScript | None = None
    model: ModelInput = ModelInput()
    data: Data = Data()
    parallel: Parallel = Parallel()
    rollout: Rollout = Rollout()
    dapo: Dapo = Dapo()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    environment: dict[str, str] = Field({}, description="extra environment variables of every process of the job")
    verl: dict[str, Scalar | list | dict] = Field({}, description="verl (hydra) keys passed through unchanged")

    @model_validator(mode="after")
    def _has_inputs(self) -> Recipe:
        if self.inputs is None:
            for section, key in (("model", "path"), ("data", "train")):
                if getattr(getattr(self, section), key) is None:
                    raise ValueError(f"{section}.{key} is missing and no `inputs.script` makes it")
        return self


def load(name_or_file: str, changes: list[str] | None = None) -> Recipe:
    """Read a recipe by name (from jobs/recipes) or by path and apply `key=value` changes.

    Raises:
        UsageFault: no such recipe, not YAML, unknown key (the nearest known key is named), or wrong type.
    """
    file = find(name_or_file)
    try:
        tree = yaml.safe_load(file.read_text())
    except yaml.YAMLError as problem:
        raise UsageFault(f"{file} is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(tree, dict):
        raise UsageFault(f"{file} holds no mapping; a recipe is a YAML mapping such as `steps: 100`")
    tree = _absolute_paths(tree, Recipe, file.resolve().parent)
    for change in changes or []:
        tree = _changed(tree, change)
    return parse(tree, str(file))


def find(name_or_file: str) -> Path:
    """The file of a recipe given by name or path."""
    named = RECIPES / f"{name_or_file}.yaml"
    if "/" not in name_or_file and named.is_file():
        return named
    file = Path(name_or_file)
    if file.suffix in {".yaml", ".yml"} and file.is_file():
        return file
    known = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    hint = difflib.get_close_matches(name_or_file, known, 1)
    raise UsageFault(
        f"no recipe {name_or_file!r}: not a file, and not one of {', '.join(known) or '(none)'}"
        + (f"; did you mean {hint[0]}?" if hint else "")
    )


def parse(tree: dict, origin: str) -> Recipe:
    """Check a tree against the schema.

    Raises:
        UsageFault: one line naming the key, what is wrong and, for an unknown key, the nearest known one.
    """
    try:
        return Recipe.model_validate(tree)
    except ValidationError as problem:
        errors = [_explain(error) for error in problem.errors()]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise UsageFault(f"{origin}: {errors[0]}{more}") from None


def _explain(error: dict) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known_keys(Recipe), 1, cutoff=0.4)
        return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, found {error['input']!r}"


def known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys of the schema."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if (inner := _section_of(field)) is not None:
            keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def _section_of(field: Any) -> type[Section] | None:
    candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), None)


def _is_path(field: Any) -> bool:
    metadata = [field, *getattr(field, "metadata", [])]
    return "Path" in str(field.annotation) or any(m is Path for m in metadata)


def _absolute_paths(tree: dict, section: type[Section], base: Path) -> dict:
    """Resolve the relative paths of `tree` against `base`; values that are no strings are left to validation."""
    resolved = dict(tree)
    for name, field in section.model_fields.items():
        value = tree.get(name)
        if isinstance(value, dict) and (inner := _section_of(field)) is not None:
            resolved[name] = _absolute_paths(value, inner, base)
        elif isinstance(value, str) and _is_path(field):
            resolved[name] = str((base / Path(value).expanduser()).absolute())
    return resolved


def _changed(tree: dict, change: str) -> dict:
    """Apply one `--set key=value`; the value is read as YAML. Keys below `verl` may hold dots of their own."""
    key, separator, text = change.partition("=")
    if not separator or not key:
        raise UsageFault(f"--set {change!r} is not key=value, for example --set steps=20")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageFault(f"--set {change!r}: the value is not YAML") from None
    if isinstance(value, str) and _is_number(value):
        value = float(value)  # YAML 1.1 reads 1e-6 as a string
    parts = ["verl", key[len("verl.") :]] if key.startswith("verl.") else key.split(".")
    for part in reversed(parts):
        value = {part: value}
    return _merged(tree, _absolute_paths(value, Recipe, Path.cwd()))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _merged(tree: dict, change: dict) -> dict:
    merged = dict(tree)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
