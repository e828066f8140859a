"""Guarded fixes of upstream code: each has an id, a reason, a version range and a check of the code it changes.

    @patch(
        id="ddp-config",
        reason="gradients of N >= 2 workers are wrong: DDP ignores use_distributed_optimizer=False",
        upstream="verl PR #5775",
        package="verl",
        versions=">=0.7.0,<0.8",
        target="verl.utils.megatron_utils:make_megatron_module",
        expects="ddp_config=override_ddp_config",
    )
    def make_megatron_module(original):
        def fixed(*args, **kwargs): ...
        return fixed

The decorated function receives the object that `target` names and returns its replacement. `expects` is a piece of the
target's source text that must still be there; `ABSENT` says that the attribute must not exist yet (a gap is filled).
A fix with several targets is several patches with one id. Declaring patches is cheap and imports no upstream module:
`apply` waits until somebody imports the target's module. A patch whose package is too new or whose code has changed is
never applied and always listed by `outcomes`; changed code is logged as a warning as well.

`ATLASRL_WITHOUT_FIX=id1,id2` leaves fixes out: the negative control of every test, and a way to ask "is it our patch?".
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType

logger = logging.getLogger(__name__)

ABSENT = "(absent)"
"""Value of `expects` for a patch that adds something: the target must not exist."""

WITHOUT = "ATLASRL_WITHOUT_FIX"


@dataclass(frozen=True)
class Patch:
    id: str
    reason: str
    upstream: str
    package: str
    versions: str
    target: str
    expects: str
    replace: Callable

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]


@dataclass(frozen=True)
class Outcome:
    """What became of one patch in this process."""

    id: str
    target: str
    state: str
    """applied | waiting (its module is not imported) | switched off | not needed | does not apply"""
    detail: str = ""


_registry: list[Patch] = []
_outcomes: dict[tuple[str, str], Outcome] = {}
_originals: list[tuple[object, str, object]] = []  # owner, attribute, what was there; None for a gap


def patch(
    *, id: str, reason: str, upstream: str, package: str, versions: str, target: str, expects: str
) -> Callable[[Callable], Callable]:
    """Register the decorated `replace(original) -> replacement` as a fix of `target` ("module:Owner.attribute")."""

    def register(replace: Callable) -> Callable:
        _registry.append(Patch(id, reason, upstream, package, versions, target, expects, replace))
        return replace

    return register


def listing(*ids: str) -> list[dict]:
    """The registered fixes (all, or those named) as plain data, one entry per id, for the plan."""
    entries: dict[str, dict] = {}
    for found in _chosen(ids):
        fields = asdict(found)
        fields.pop("replace")
        entry = entries.setdefault(found.id, {**fields, "targets": []})
        entry["targets"].append(entry.pop("target", found.target) if not entry["targets"] else found.target)
    return list(entries.values())


def switched_off(environment: Mapping[str, str]) -> set[str]:
    """The ids that ATLASRL_WITHOUT_FIX leaves out."""
    return {name.strip() for name in (environment.get(WITHOUT) or "").split(",")} - {""}


def apply(*ids: str) -> None:
    """Apply the registered fixes (all, or those named), each as soon as its target's module is imported."""
    off = switched_off(os.environ)
    for found in _chosen(ids):
        if (known := _outcomes.get((found.id, found.target))) and known.state in {"applied", "waiting"}:
            continue
        if found.id in off:
            _note(found, "switched off", f"{WITHOUT} names it")
        elif reason := _out_of_range(found):
            _note(found, "not needed", reason)
        else:
            _note(found, "waiting")
            after_import(found.module, lambda module, found=found: _apply(found, module))


def outcomes() -> list[Outcome]:
    """What became of every patch that `apply` was asked for in this process."""
    return list(_outcomes.values())


def undo() -> None:
    """Put back what the fixes replaced in this process, drop those that wait: upstream's code as it is."""
    _hook.waiting.clear()
    while _originals:
        owner, attribute, original = _originals.pop()
        if original is None:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)
    _outcomes.clear()


def _chosen(ids: tuple[str, ...]) -> list[Patch]:
    unknown = set(ids) - {p.id for p in _registry}
    if unknown:
        raise KeyError(f"no patch is registered as {', '.join(sorted(unknown))}")
    return [p for p in _registry if not ids or p.id in ids]


def _note(found: Patch, state: str, detail: str = "") -> None:
    _outcomes[found.id, found.target] = Outcome(found.id, found.target, state, detail)


def _out_of_range(found: Patch) -> str | None:
    from packaging.specifiers import SpecifierSet

    try:
        version = importlib.metadata.version(found.package)
    except importlib.metadata.PackageNotFoundError:
        return f"{found.package} is not installed"
    if SpecifierSet(found.versions).contains(version, prereleases=True):
        return None
    return f"{found.package} {version} is outside {found.versions}"


def _apply(found: Patch, module: ModuleType) -> None:
    owner: object = module
    *owners, attribute = found.target.partition(":")[2].split(".")
    try:
        for name in owners:
            owner = getattr(owner, name)
        original = inspect.getattr_static(owner, attribute, None)
    except AttributeError as problem:
        original, found_text = None, str(problem)
    else:
        found_text = ABSENT if original is None else _source(original)
    if found.expects == ABSENT and original is not None:
        _note(found, "not needed", f"{found.target} exists")
        return
    if found.expects not in found_text:
        _note(found, "does not apply", f"{found.target} is not the code this fix was written for")
        logger.warning(
            "fix %s does not apply: %s has changed; check whether it is still needed", found.id, found.target
        )
        return
    setattr(owner, attribute, found.replace(original))
    _originals.append((owner, attribute, original))
    _note(found, "applied")


def _source(original: object) -> str:
    function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return repr(function)


# -- imports --------------------------------------------------------------------------------------


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs callbacks right after a module's own code: patches need no early import of heavy modules."""

    def __init__(self):
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, name, path, target=None):
        if name not in self.waiting:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            for callback in self.waiting.pop(name, []):
                callback(module)

        spec.loader.exec_module = execute_then_call
        return spec


_hook = _AfterImport()


def after_import(module: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` now if `module` is imported, otherwise right after its first import."""
    if module in sys.modules:
        callback(sys.modules[module])
        return
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)
    _hook.waiting.setdefault(module, []).append(callback)
