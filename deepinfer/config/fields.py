"""Reads a dataclass out of a JSON object, key by key; every error names the file, the key and what it takes."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from deepinfer.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Above:
    """Bound of a number, or of every entry of a list: at least `low`, or more than it when `strict`."""

    low: float
    strict: bool = False


Size = Annotated[int, Above(1)]
Count = Annotated[int, Above(0)]
TokenId = Annotated[int, Above(0)]
Ids = Annotated[tuple[int, ...], Above(0)]
Sizes = Annotated[tuple[int, ...], Above(1)]
Positive = Annotated[float, Above(0, strict=True)]
NonNegative = Annotated[float, Above(0)]

T = TypeVar("T")


def read_fields(cls: type[T], data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of `data` that are fields of dataclass `cls`, checked against their annotations.

    Fields without a default are required; other keys are ignored; `null` counts as absent. Fields that are
    dataclasses themselves are left to the caller. Raises ConfigError.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        kind, bound = _unwrap(hints[field.name])
        if kind not in _NAMES:
            continue
        value = data.get(field.name)
        if value is not None:
            values[field.name] = _convert(value, kind, bound, f"{where}: {field.name}")
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{where}: key {field.name} is missing; it takes {_describe(kind, bound)}")
    return values


def section(data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any] | None:
    """The object under `key`, or None where it is absent or null. Raises ConfigError where it is something else."""
    value = data.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {key} takes an object, not {value!r}")
    return value


_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", tuple: "a list of integers"}


def _unwrap(hint: Any) -> tuple[Any, Above | None]:
    """Annotation -> (one of int, float, str, bool, tuple, or something else; its bound)."""
    bound = None
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if type(None) in typing.get_args(hint) and len(args) == 1:
        hint = args[0]
    if typing.get_origin(hint) is Annotated:
        hint, bound = typing.get_args(hint)
    return typing.get_origin(hint) or hint, bound


def _convert(value: Any, kind: Any, bound: Above | None, name: str) -> Any:
    if kind is tuple:
        fits = isinstance(value, list | tuple) and all(_fits(entry, int, bound) for entry in value)
    else:
        fits = _fits(value, kind, bound)
    if not fits:
        raise ConfigError(f"{name} takes {_describe(kind, bound)}, not {value!r}")
    return kind(value)


def _fits(value: Any, kind: Any, bound: Above | None) -> bool:
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if not isinstance(value, int | float if kind is float else kind):
        return False
    if bound is None:
        return True
    return math.isfinite(value) and (value > bound.low if bound.strict else value >= bound.low)


def _describe(kind: Any, bound: Above | None) -> str:
    if bound is None:
        return _NAMES[kind]
    return f"{_NAMES[kind]} {'above' if bound.strict else 'of at least'} {bound.low:g}"
