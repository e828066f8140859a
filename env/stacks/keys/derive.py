"""Derive verl's settings from its sources: dotted key, type, backends. Imports no verl.

    python env/stacks/keys/derive.py PATH/TO/verl >env/stacks/keys/verl-VERSION.txt

PATH is the package folder of a clone or of an unpacked wheel. Keys are those of the two composed YAML files
(trainer/config/_generated_ppo*_trainer.yaml) and the further fields of the dataclass that each section becomes; types
come from the dataclass where there is one, else from the YAML's value. `any` accepts everything.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

FILES = {"fsdp2": "_generated_ppo_trainer.yaml", "megatron": "_generated_ppo_megatron_trainer.yaml"}
BASIC = {"bool", "int", "float", "str", "list", "dict"}


def classes(package: Path) -> dict[str, ast.ClassDef]:
    """Every class of the packages that hold configuration dataclasses, by name."""
    found = {}
    for folder in ("workers/config", "trainer/config", "utils/profiler"):
        for file in sorted((package / folder).rglob("*.py")):
            found |= {n.name: n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)}
    return found


def fields(name: str, known: dict[str, ast.ClassDef]) -> dict[str, str]:
    """Field -> annotation of a dataclass and its bases."""
    if name not in known:
        return {}
    found = {}
    for base in known[name].bases:
        found |= fields(ast.unparse(base), known)
    for node in known[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = ast.unparse(node.annotation)
    return {field: annotation for field, annotation in found.items() if not field.startswith("_")}


def word(annotation: str) -> str:
    """One of `BASIC`, several joined by |, or any: `Optional[int]` -> int, `float | str` -> float|str."""
    inner = re.sub(r"^(?:Optional|Union)\[(.*)\]$", r"\1", annotation)
    parts = {re.split(r"[\[.]", part.strip())[0].lower() for part in re.split(r"[|,](?![^\[]*\])", inner)}
    parts -= {"none"}
    return "|".join(sorted(parts)) if parts and parts <= BASIC else "any"


def settings(tree: dict, known: dict[str, ast.ClassDef], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Key and type of every setting of a section and of those below it."""
    annotated = fields(str(tree.get("_target_", "")).rpartition(".")[2], known)
    for name, value in tree.items():
        if name == "_target_":
            continue
        if isinstance(value, dict):
            yield prefix + name, "dict"
            yield from settings(value, known, f"{prefix}{name}.")
        elif name in annotated:
            yield prefix + name, word(annotated[name])
        elif name.endswith("_files"):  # one path or several; RLHFDataset takes both
            yield prefix + name, "list|str"
        elif value is None or (isinstance(value, str) and "${" in value):
            yield prefix + name, "any"
        else:
            yield prefix + name, "float" if type(value) is int and name.endswith("lr") else type(value).__name__
    for name, annotation in annotated.items():
        if name not in tree:
            yield prefix + name, word(annotation)


def derive(package: Path) -> dict[str, tuple[str, str]]:
    """Key -> type and backends."""
    known, found = classes(package), {}
    for backend, name in FILES.items():
        tree = yaml.safe_load((package / "trainer" / "config" / name).read_text())
        for key, kind in settings(tree, known):
            before = found.get(key)
            kinds = kind if before is None or before[0] == kind else "any"
            found[key] = (kinds, backend if before is None else f"{before[1]},{backend}")
    return found


if __name__ == "__main__":
    for key, (kind, backends) in sorted(derive(Path(sys.argv[1])).items()):
        print(key, kind, backends)
