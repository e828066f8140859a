"""The case: everything a rule may look at, gathered once. Reads no device and starts nothing."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlasrl import legality
from atlasrl.errors import Fault, UsageFault

if TYPE_CHECKING:
    from atlasrl.memory.architecture import Architecture
    from atlasrl.recipe import Recipe
    from atlasrl.stacks import Stack

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
OPTIMIZER = f"{ACTOR}.optim.override_optimizer_config"
ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"


@dataclass(frozen=True)
class Case:
    """A recipe on so many nodes, with the settings and variables it becomes."""

    recipe: Recipe
    nodes: int
    devices: int
    """Of one node."""
    stack: Stack | None
    architecture: Architecture | None
    """None: the model's configuration is not on this machine and not among the published ones."""
    settings: Mapping[str, Any]
    """verl's settings by dotted key, without the `+` of hydra."""
    refused: str | None
    """Why the recipe cannot become settings; they are then those of its `verl:` section alone."""
    environment: Mapping[str, str]

    @property
    def world(self) -> int:
        return self.nodes * self.devices

    @property
    def on_npu(self) -> bool:
        return self.recipe.device == "npu"

    @property
    def megatron(self) -> bool:
        return self.recipe.backend == "megatron"

    @property
    def vllm_on_npu(self) -> bool:
        return self.on_npu and self.recipe.rollout.engine == "vllm"

    @property
    def latent(self) -> bool:
        """Whether the model has multi-head latent attention."""
        return self.architecture is not None and self.architecture.latent is not None

    @functools.cached_property
    def split(self) -> legality.Split | None:
        if self.architecture is None or not self.megatron:
            return None
        recipe = self.recipe.model_copy(update={"devices_per_node": self.devices})
        return legality.split_of(recipe, self.architecture, self.nodes)

    def can(self, capability: str, otherwise: Any = True) -> Any:
        """A capability of the stack; `otherwise` where no stack is known."""
        return otherwise if self.stack is None else getattr(self.stack.capabilities, capability)

    def within(self, package: str, versions: str) -> bool:
        """Whether the stack has the package in these versions; where no stack is known, nothing is held against it."""
        return self.stack is not None and self.stack.within(package, versions)

    def mended(self, fix: str) -> bool:
        """Whether this project's fix of that id is declared, is for the stack's version, and is not switched off."""
        from atlasrl.trainer import fixes, patches

        known = fixes.declared().get(fix)
        if known is None or fix in patches.switched_off(self.environment):
            return False
        return self.stack is None or self.stack.within(known["package"], known["versions"])

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting by its dotted key; a mapping may be given as one value or key by key."""
        for cut in range(len(parts := key.split(".")), 0, -1):
            if (prefix := ".".join(parts[:cut])) in self.settings:
                value = self.settings[prefix]
                for part in parts[cut:]:
                    value = value.get(part) if isinstance(value, Mapping) else None
                if value is not None:
                    return value
        below = {
            name.removeprefix(f"{key}."): value for name, value in self.settings.items() if name.startswith(f"{key}.")
        }
        return below or default

    def additional(self, key: str, default: Any = None) -> Any:
        """An option of vllm-ascend: `additional_config` of the engine."""
        return self.setting(f"{VLLM}.additional_config.{key}", default)

    @functools.cached_property
    def index(self) -> frozenset[str]:
        """Tensor names of the index of a BF16 copy that is already there and used as it is; else empty."""
        tree = self._of_copy("model.safetensors.index.json").get("weight_map", {})
        return frozenset(tree) if isinstance(tree, dict) else frozenset()

    @functools.cached_property
    def config(self) -> dict:
        """config.json of a BF16 copy that is already there; else empty."""
        return self._of_copy("config.json")

    def _of_copy(self, name: str) -> dict:
        folder = self.recipe.model.cast_path
        if folder is None:
            return {}
        try:
            tree = json.loads((folder / name).read_text())
        except (OSError, ValueError):  # the cast stage makes or judges the copy
            return {}
        return tree if isinstance(tree, dict) else {}


def gather(
    recipe: Recipe, nodes: int, devices: int, stack: Stack | None, environment: Mapping[str, str] | None = None
) -> Case:
    """Build the case. `environment` is that of the plan; absent: of env/<device>.env.sh and the recipe."""
    settings, refused = _settings(recipe, nodes, devices)
    return Case(
        recipe=recipe,
        nodes=nodes,
        devices=devices,
        stack=stack,
        architecture=_architecture(recipe),
        settings=settings,
        refused=refused,
        environment=_environment(recipe) if environment is None else environment,
    )


def _settings(recipe: Recipe, nodes: int, devices: int) -> tuple[dict[str, Any], str | None]:
    from atlasrl.rundir import RunDir
    from atlasrl.trainer.overrides import verl_overrides

    own = {key.lstrip("+"): value for key, value in recipe.verl.items()}
    try:
        made = verl_overrides(
            recipe,
            nodes=nodes,
            devices_per_node=devices,
            model=recipe.model.cast_path or "model",
            train=recipe.data.train or "train.parquet",
            val=recipe.data.val,
            run=RunDir(Path("run")),
        )
    except UsageFault as fault:
        return own, str(fault)
    return {override.key.lstrip("+"): override.value for override in made}, None


def _architecture(recipe: Recipe) -> Architecture | None:
    from atlasrl.memory import job

    try:
        return job.architecture_of(recipe)
    except Fault:
        return None


def _environment(recipe: Recipe) -> dict[str, str]:
    import shlex

    from atlasrl import plan

    file = plan.ROOT / "env" / f"{recipe.device}.env.sh"
    found = plan.EXPORT.findall(file.read_text()) if file.exists() else []
    return {name: shlex.split(value)[0] if value else "" for name, value, _ in found} | recipe.environment
