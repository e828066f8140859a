"""Stand-ins for packages that no CPU has: every module of them imports, with a class of any name in it."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class AnyClass(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return any_class(name)


def any_class(name: str) -> AnyClass:
    return AnyClass(name, (), {"__init__": lambda self, *args, **options: None})


class AnyModule(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, any_class(name))
        return getattr(self, name)


class Packages:
    """Finds every module of the given packages that is not loaded otherwise."""

    def __init__(self, *names: str):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec):
        return AnyModule(spec.name)

    def exec_module(self, module):
        pass


def stand_in(*names: str) -> None:
    sys.meta_path.insert(0, Packages(*names))
