"""From YAML and overrides to dataclasses, strictly: a key that is not a field is an error with a suggestion."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from transformer2.conversion.paths import user_path
from transformer2.errors import UserError
from transformer2.variants import describe


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(user_path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the configuration file {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"The configuration file {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"The configuration file {path} must hold keys and values, such as `model: path/to/checkpoint`."
        )
    return tree


def override_with(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `tree` with "a.b=value" put in; the value is read as YAML."""
    path, equals, text = override.partition("=")
    if not equals or not all(path.split(".")):
        raise UserError(f"Cannot read the override {override!r}: write it as section.key=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"The value of the override {override!r} is not YAML: quote it.") from None
    key, _, rest = path.partition(".")
    if rest:
        section = tree.get(key)
        value = override_with(dict(section) if isinstance(section, Mapping) else {}, f"{rest}={text}")
    return {**tree, key: value}


def build(schema: type, tree: Any, where: str) -> Any:
    """A mapping -> the dataclass `schema`; `where` is the dotted path of the section, for messages."""
    if not isinstance(tree, Mapping):
        raise UserError(f"The setting {where} must be a section of keys and values, got {tree!r}.")
    known = typing.get_type_hints(schema)
    values = {}
    for key, value in tree.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys here are: {', '.join(known)}."
            raise UserError(f"Unknown setting {name!r}: {hint}")
        if dataclasses.is_dataclass(known[key]):
            values[key] = build(known[key], value, name)
        else:
            values[key] = _convert(value, known[key], name)
    return schema(**values)


def _convert(value: Any, annotation: Any, name: str) -> Any:
    """`value` in its annotated type. YAML reads 1e-3 as text, so text is accepted for numbers."""
    for kind in _alternatives(annotation):
        origin = typing.get_origin(kind)
        if origin is Literal and value in typing.get_args(kind):
            return value
        if dataclasses.is_dataclass(kind):
            return build(kind, value, name)
        if origin is list and isinstance(value, list | tuple):
            item_kind = typing.get_args(kind)[0]
            return [
                _convert(item, item_kind, f"{name}[{index}]" if _nested(item_kind) else name)
                for index, item in enumerate(value)
            ]
        if kind is Any:
            return value
        if origin is dict and isinstance(value, Mapping):
            return {str(key): _convert(item, typing.get_args(kind)[1], f"{name}.{key}") for key, item in value.items()}
        if kind is type(None) and value is None:
            return None
        if kind is float and not isinstance(value, bool) and isinstance(value, int | float | str):
            try:
                return float(value)
            except ValueError:
                continue
        if kind in (bool, int, str) and type(value) is kind:
            return value
    raise UserError(f"The setting {name} must be {describe(annotation)}, got {value!r}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    several = typing.get_origin(annotation) in (types.UnionType, typing.Union)  # the latter: Literal[...] | None
    return typing.get_args(annotation) if several else (annotation,)


def _nested(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict
