"""Checked YAML: what recipes and sites share. Strict sections, errors in one line, `key=value` changes.

The YAML dialect is 1.2 for numbers and booleans: `time: 12:00:00` stays a text (YAML 1.1 reads 43200), `1e-6` is a
number (1.1 reads a text), `no` is a text. A key that stands twice is an error.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from atlasrl.errors import UsageFault

PathLike = Annotated[Path, Field(json_schema_extra={"path": True})]
Scalar = bool | int | float | str | None
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Schema = TypeVar("Schema", bound=Section)


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml reads a file in a tenth of the time


class _Yaml(_Loader):
    """Safe YAML with the number and boolean rules of YAML 1.2 and without duplicate keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way to declare them)
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in {"int", "float", "bool"}]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_FLOAT = (
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
for _tag, _pattern, _firsts in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
):
    _Yaml.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_firsts))


def read_yaml(text: str) -> Any:
    """Parse one YAML document. Raises yaml.YAMLError."""
    return yaml.load(text, _Yaml)


def load(schema: type[Schema], file: Path, changes: list[str] | None = None) -> Schema:
    """Read `file`, apply `key=value` changes and check it.

    Relative paths in the file are relative to its folder; relative paths in a change to the current directory.

    Raises:
        UsageFault: not readable, not YAML, unknown key (the nearest known key is named), or wrong type.
    """
    try:
        tree = read_yaml(file.read_text())
    except yaml.YAMLError as problem:
        raise UsageFault(f"{file} is not YAML: {' '.join(str(problem).split())}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageFault(f"{file} cannot be read: {problem}") from None
    if not isinstance(tree, dict):
        kind = schema.__name__.lower()
        raise UsageFault(f"{file} holds no mapping; a {kind} is a YAML mapping such as `description: ...`")
    tree = _absolute_paths(tree, schema, file.resolve().parent)
    for change in changes or []:
        tree = _changed(tree, change, schema)
    return parse(schema, tree, str(file))


def changed(checked: Schema, changes: list[str]) -> Schema:
    """A checked section with `key=value` changes, checked again. Raises UsageFault."""
    tree = checked.model_dump(mode="json")
    for change in changes:
        tree = _changed(tree, change, type(checked))
    return parse(type(checked), tree, "the changed recipe")


def find(kind: str, folder: Path, name_or_file: str) -> Path:
    """The file of a recipe or site given by name (a file of `folder`) or by path."""
    named = folder / f"{name_or_file}.yaml"
    if "/" not in name_or_file and named.is_file():
        return named
    file = Path(name_or_file)
    if file.suffix in {".yaml", ".yml"} and file.is_file():
        return file
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    hint = difflib.get_close_matches(name_or_file, known, 1)
    raise UsageFault(
        f"no {kind} {name_or_file!r}: not a file, and not one of {', '.join(known) or '(none)'}"
        + (f"; did you mean {hint[0]}?" if hint else "")
    )


def parse(schema: type[Schema], tree: dict, origin: str) -> Schema:
    """Check a tree against the schema.

    Raises:
        UsageFault: one line naming the key, what is wrong and, for an unknown key, the nearest known one.
    """
    try:
        return schema.model_validate(tree)
    except ValidationError as problem:
        errors = [_explain(error, schema) for error in problem.errors()]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise UsageFault(f"{origin}: {errors[0]}{more}") from None


def _explain(error: dict, schema: type[Section]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known_keys(schema), 1, cutoff=0.4)
        return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] == "value_error":
        return (f"{key}: " if key else "") + str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"{key} is missing"
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
    """Resolve the relative paths of `tree` against `base`; values that are no paths are left to validation."""

    def absolute(value: Any) -> Any:
        return str(os.path.normpath(base / Path(value).expanduser())) if isinstance(value, str) else value

    resolved = dict(tree)
    for name, field in section.model_fields.items():
        value = tree.get(name)
        if isinstance(value, dict) and (inner := _section_of(field)) is not None:
            resolved[name] = _absolute_paths(value, inner, base)
        elif _is_path(field):
            resolved[name] = [absolute(each) for each in value] if isinstance(value, list) else absolute(value)
    return {key: resolved[key] for key in tree}


def _changed(tree: dict, change: str, schema: type[Section]) -> dict:
    """Apply one `key=value`; the value is read as YAML. Keys below a free mapping may hold dots of their own."""
    key, separator, text = change.partition("=")
    if not separator or not key:
        raise UsageFault(f"--set {change!r} is not key=value, for example --set steps=20")
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        raise UsageFault(f"--set {change!r}: the value is not YAML") from None
    first, _, rest = key.partition(".")
    free = rest and first in schema.model_fields and "dict" in str(schema.model_fields[first].annotation)
    for part in reversed([first, rest] if free else key.split(".")):
        value = {part: value}
    return _merged(tree, _absolute_paths(value, schema, Path.cwd()))


def _merged(tree: dict, change: dict) -> dict:
    merged = dict(tree)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
