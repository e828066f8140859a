"""The recipe: what to train. A YAML file checked against this schema before anything starts.

Relative paths in a recipe are relative to the recipe's own folder; paths given with `--set` are relative to the
current directory. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from atlasrl import schema
from atlasrl.schema import PathLike, Scalar, Section, Text

RECIPES = Path(__file__).resolve().parents[2] / "jobs" / "recipes"


class InputScript(Section):
    """Makes the recipe's inputs once per run, from what is installed: `python SCRIPT --out RUN/input`."""

    script: PathLike


class ModelInput(Section):
    """The checkpoint to start from: a Hugging Face folder of safetensors, BF16 or FP8."""

    path: PathLike | None = Field(None, description="folder; absent when `inputs` makes RUN/input/model")
    cast_path: PathLike | None = Field(None, description="BF16 copy shared by runs; absent: each run makes its own")
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
    deduplicate: bool = Field(True, description="each prompt once an epoch, however often it is in the data")


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
    virtual_pipeline: PositiveInt = Field(1, description="model chunks per pipeline stage (interleaved schedule)")
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] = Field(
        "uniform", description="full: every group of recompute_layers keeps its input, or only the first layers do"
    )
    recompute_layers: PositiveInt = 1
    recompute_modules: list[Literal["layernorm", "mla_up_proj", "moe_act", "mlp", "moe"]] = Field(
        [], description="what `selective` recomputes"
    )
    optimizer_on_host: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="share of the optimizer state that lives and steps on the host (Megatron optimizer_cpu_offload)",
    )
    offload: bool = Field(False, description="parameters, gradients and optimizer state on the host between phases")


class Stub(Section):
    """Made-up answers: random tokens, log-normal lengths. Training runs before inference works, and learns nothing."""

    median_tokens: PositiveInt = 512
    spread: Annotated[float, Field(ge=0)] = Field(0.5, description="standard deviation of the logarithm of the length")


class Rollout(Section):
    """How answers are generated."""

    engine: Literal["vllm", "cpu"] = "vllm"
    samples: PositiveInt = Field(16, description="answers per prompt")
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    tensor: PositiveInt = 1
    expert: PositiveInt = 1
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    graph: Literal["none", "torchair", "acl"] = Field(
        "none", description="decoding as a captured graph on an NPU; latent attention of vllm-ascend 0.10: torchair"
    )
    chunked_prefill: bool = Field(
        False, description="fused kernel for chunked prefill of latent attention (vllm-ascend 0.10; later: always)"
    )
    record: bool = Field(False, description="keep the answers of every step in RUN/rollouts")
    replay: PathLike | None = Field(None, description="run (or its rollouts folder) whose answers are trained on again")
    stub: Stub | None = None

    @property
    def offline(self) -> bool:
        """No inference engine is built."""
        return self.replay is not None or self.stub is not None

    @model_validator(mode="after")
    def _has_one_source(self) -> Rollout:
        if (self.record, self.replay is not None, self.stub is not None).count(True) > 1:
            raise ValueError("record, replay and stub exclude each other: answers come from one place")
        return self


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
    tokens_per_device: PositiveInt | None = Field(
        None, description="pack answers into forward passes of so many tokens per device, instead of micro_batch_size"
    )
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


class Guard(Section):
    """Judge the run at every step while it trains; see docs/compare.md."""

    baseline: PathLike | None = Field(None, description="folder of a stored baseline; absent: checks that need none")
    action: Literal["warn", "stop"] = "warn"
    after_steps: PositiveInt = Field(20, description="nothing is judged before; early curves are noise")
    rules: PathLike | None = Field(None, description="rules file instead of the defaults")


class Probe(Section):
    """What a run records for bin/probe and bin/memory."""

    syncs: Annotated[int, Field(ge=0)] = Field(
        0, description="first weight syncs around which weights are digested and derived tensors checked"
    )
    memory: bool = Field(
        False, description="sample resident memory of every process; `bin/memory profile RUN` reads it"
    )


class Recipe(Section):
    """What to train. `nodes` and `devices_per_node` are defaults that the command line may change."""

    description: str = ""
    device: Literal["npu", "cuda", "cpu"] = "npu"
    backend: Literal["megatron", "fsdp2"] = "megatron"
    stack: Text | None = Field(None, description="versions, a name in env/stacks; absent: a2-0.7.0 (npu), cpu (cpu)")
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 8
    steps: PositiveInt = 100
    validate_every: Annotated[int, Field(ge=0)] = Field(0, description="steps between validations; 0: never")
    seed: int = 1
    deterministic: bool = Field(False, description="equal seeds give equal numbers, slower; proven on every worker")
    inputs: InputScript | None = None
    model: ModelInput = ModelInput()
    data: Data = Data()
    parallel: Parallel = Parallel()
    rollout: Rollout = Rollout()
    dapo: Dapo = Dapo()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard | None = None
    probe: Probe = Probe()
    accept: list[Text] = Field([], description="rules of lint and checks of preflight that do not stop this run")
    environment: dict[str, Text] = Field({}, description="extra environment variables of every process of the job")
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
    return schema.load(Recipe, find(name_or_file), changes)


def find(name_or_file: str) -> Path:
    """The file of a recipe given by name or path."""
    return schema.find("recipe", RECIPES, name_or_file)


def parse(tree: dict, origin: str) -> Recipe:
    """Check a tree, such as the `recipe` of a plan.json, against the schema. Raises UsageFault."""
    return schema.parse(Recipe, tree, origin)
