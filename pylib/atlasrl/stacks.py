"""The stack: a named, complete set of versions with its install steps and its capabilities. Data in env/stacks.

What a version can and cannot do is a capability with a name. Rules and plans ask for capabilities, never for version
numbers, except where a fix of ours names the versions it is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from atlasrl import schema
from atlasrl.schema import Section, Text

STACKS = Path(__file__).resolve().parents[2] / "env" / "stacks"
DEFAULT = {"npu": "a2-0.7.0", "cpu": "cpu"}
"""The stack of a recipe that names none, by device. CUDA has none: its versions are the site's."""


def _known_version(value: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        Version(value)
    except InvalidVersion:
        raise ValueError(f"{value!r} is no version number") from None
    return value


class Package(Section):
    """One package: a release of PyPI, or a commit or tag of a git repository."""

    version: Annotated[Text, AfterValidator(_known_version)] = Field(description="what importlib.metadata must say")
    git: Text | None = None
    commit: Text | None = Field(None, description="commit or tag; two commits may carry the same version")
    note: str = ""

    @model_validator(mode="after")
    def _git_has_commit(self) -> Package:
        if (self.git is None) != (self.commit is None):
            raise ValueError("git and commit belong together: a branch moves, a repository alone says nothing")
        return self

    def requirement(self, name: str) -> str:
        """What pip installs, for example `verl==0.7.1` or `verl @ git+https://…@commit`."""
        return f"{name} @ git+{self.git}@{self.commit}" if self.git else f"{name}=={self.version}"


class Step(Section):
    """One step of the installation; the order of the steps matters."""

    name: str
    packages: list[Text] = Field([])
    remove: list[Text] = Field([], description="packages that must go first because they shadow one of these")
    dependencies: bool = Field(True, description="false: --no-deps, since the declared ones are wrong for this device")
    requirements: Text | None = Field(None, description="a requirements file of the package's clone, installed first")
    clone: Text | None = Field(None, description="URL@COMMIT where that file is, for a package that is a release")
    environment: dict[str, Text] = Field({}, description="variables that the build reads")
    check: Text | None = Field(None, description="shell line that must hold; for what pip cannot install")
    note: str = ""


class Capabilities(Section):
    """What the stack can do. A rule that needs to know more gets a new name here."""

    rollout: Literal["sync", "async"] = Field(description="sync: engines inside the workers (SPMD); async: servers")
    expert_parallel: Literal["environment", "option"] = Field(description="how the rollout learns of its data ranks")
    weights_processed_after_sync: bool = Field(description="process_weights_after_loading runs after each weight sync")
    keeps_max_model_len: bool = Field(description="rollout.max_model_len is not overwritten")
    list_arguments: bool = Field(description="lists under rollout.engine_kwargs reach vLLM as lists")
    skip_rollout: bool = Field(description="rollout.skip_rollout has an effect")
    resume_without_transformer_engine: bool
    mbridge_save_arguments: Literal["none", "distributed", "any"] = Field(
        description="what verl passes to save_weights: the path only, arguments mbridge must know, or only known ones"
    )
    mbridge_selects_device: bool = Field(description="weights are read to the worker's device, not to a fixed name")
    mla_softmax_scale: bool = Field(description="the attention kernel uses the scale that latent attention computes")
    mla_rotary_any: bool = Field(description="latent attention works with a rotary embedding without yarn (Moonlight)")
    chunked_prefill_mla: Literal["option", "always"] = Field(description="the fused kernel for chunked prefill")
    graph: Literal["torchair", "acl", "none"] = Field(
        description="graph capture of DeepSeek: torchair alone, ACL graphs too, or none"
    )
    profiler: Literal["csv", "db", "none"]
    config_keys: Text = Field(description="name of the committed list of verl's settings, env/stacks/keys/NAME.txt")


class Stack(Section):
    """Versions, order of installation, capabilities."""

    description: str
    device: Literal["npu", "cuda", "cpu"]
    python: Text
    driver: Text | None = None
    cann: Text | None = None
    packages: dict[str, Package]
    capabilities: Capabilities
    install: list[Step]

    @model_validator(mode="after")
    def _installs_what_it_names(self) -> Stack:
        installed = [name for step in self.install for name in step.packages]
        for name in installed:
            if name not in self.packages:
                raise ValueError(f"install names {name}, which packages does not")
        for name in self.packages:
            if installed.count(name) != 1:
                raise ValueError(f"{name} stands in {installed.count(name)} install steps; each package needs one")
        for step in self.install:
            if step.requirements and (len(step.packages) != 1 or not self.clone_of(step)):
                raise ValueError(f"{step.name}: requirements need one package, from git or with `clone`")
        return self

    def version(self, package: str) -> str | None:
        """The version of a package, as importlib.metadata says it; None when the stack has no such package."""
        found = self.packages.get(package)
        return found.version if found else None

    def within(self, package: str, versions: str) -> bool:
        """Whether the package is in the stack in one of these versions, such as ">=0.12,<0.14".

        A version before a release (0.7.0.dev0) is no 0.7.0: what was changed for the release may be missing.
        """
        from packaging.specifiers import SpecifierSet

        version = self.version(package)
        return version is not None and SpecifierSet(versions).contains(version, prereleases=True)

    def clone_of(self, step: Step) -> tuple[str, str] | None:
        """(URL, commit) of the clone that holds the step's requirements file."""
        if step.clone:
            url, _, commit = step.clone.rpartition("@")
            return url, commit
        package = self.packages[step.packages[0]]
        return (package.git, package.commit) if package.git else None

    def commands(self, step: Step, wheels: Path | None = None) -> list[list[str]]:
        """The pip commands of a step, in order, without the interpreter; from a folder of wheels when there is one.

        A wheel folder holds built wheels of git packages too, so there a version stands for the commit.
        """
        source = ["--no-index", "--find-links", str(wheels)] if wheels else []
        lines = [["uninstall", "-y", *step.remove]] if step.remove else []
        if step.packages:
            wanted = [
                f"{name}=={self.packages[name].version}" if wheels else self.packages[name].requirement(name)
                for name in step.packages
            ]
            lines.append(["install", *source, *([] if step.dependencies else ["--no-deps"]), *wanted])
        return lines


def load(name_or_file: str) -> Stack:
    """Read a stack by name (from env/stacks) or by path.

    Raises:
        UsageFault: no such stack, not YAML, unknown key (the nearest known key is named), or wrong type.
    """
    return schema.load(Stack, schema.find("stack", STACKS, name_or_file))


def of_recipe(recipe) -> Stack | None:
    """The stack that a recipe names, or the default of its device; None where nothing is known (cuda)."""
    name = recipe.stack or DEFAULT.get(recipe.device)
    return load(name) if name else None


def config_keys(stack: Stack, backend: str) -> dict[str, str] | None:
    """verl's settings in this stack: dotted key -> type, such as `int`, `float|str` or `any`.

    None where no list is kept; env/stacks/keys/derive.py makes one.
    """
    file = STACKS / "keys" / f"{stack.capabilities.config_keys}.txt"
    if not file.is_file():
        return None
    entries = (line.split() for line in file.read_text().splitlines())
    return {key: kind for key, kind, backends in entries if backend in backends.split(",")}
