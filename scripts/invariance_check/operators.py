"""Finds the first operator of a step that does not give its rows the same bits when fewer of them are there."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import deepinfer.model

# By operator: which arguments hold rows, and along which dimension; the result's rows lie along that of the first.
ROWS: dict[str, dict[int, int]] = {
    "linear": {0: 0},
    "grouped_linear": {0: 0},
    "wide_linear": {0: 0},
    "rms_norm": {0: 0},
    "rotate": {0: 0, 1: 0},
    "rotations": {0: 0},
    "route": {0: 0},
    "routed_experts": {0: 0, 1: 0, 2: 0, 6: 0},
    "shared_expert": {0: 0},
    "coefficients": {0: 0},
    "collapse": {0: 0, 1: 0},
    "expand": {0: 0, 1: 0, 2: 0},
    "advance": {0: 0, 1: 0, 2: 0},
    "remember": {0: 0, 1: 0, 3: 0},
    "index_scores": {0: 1, 2: 1},
    "row_scores": {0: 1, 1: 1, 2: 1},
}


@contextmanager
def watched(found: list[str]) -> Iterator[None]:
    """Within, every operator that the model calls runs again on some of its rows; `found` gets a line a difference."""
    replaced = []
    for module in _modules():
        for name, spec in ROWS.items():
            operator = getattr(module, name, None)
            if operator is not None:
                replaced.append((module, name, operator))
                setattr(module, name, _twice(name, spec, operator, found))
    try:
        yield
    finally:
        for module, name, operator in replaced:
            setattr(module, name, operator)


def _modules() -> list[Any]:
    names = [info.name for info in pkgutil.iter_modules(deepinfer.model.__path__)]
    return [importlib.import_module(f"deepinfer.model.{name}") for name in names]


def _twice(name: str, spec: dict[int, int], operator: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    calls = 0

    def checked(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        kept = [_copied(argument) for argument in arguments]
        result = operator(*arguments)
        dim = spec[0]
        rows = arguments[0].shape[dim]
        for first, last in _parts(rows):
            some = [_cut(a, spec[place], first, last) if place in spec else a for place, a in enumerate(kept)]
            unequal = _unequal(_flat(operator(*some)), _flat(_cut(result, dim, first, last)))
            if unequal:
                worst = max((one - other).abs().max().item() for one, other in unequal)
                found.append(f"{name}, call {calls}: rows {first} to {last - 1} of {rows} differ by up to {worst:.3g}")
        return result

    return checked


def _parts(rows: int) -> list[tuple[int, int]]:
    cuts = sorted({0, min(1, rows), min(3, rows), rows // 2, max(0, rows - 1), rows})
    return [(first, last) for first, last in pairwise(cuts) if (first, last) != (0, rows)]


def _copied(value: Any) -> Any:
    """Operators may write over their arguments."""
    return value.clone() if isinstance(value, Tensor) else value


def _cut(value: Any, dim: int, first: int, last: int) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return value.narrow(dim, first, last - first)
    if callable(value):  # asked for when it is needed
        return partial(_cut, value(), dim, first, last)
    parts = [_cut(part, dim, first, last) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _unequal(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(a, b) for a, b in zip(one, other, strict=True) if a.numel() and not torch.equal(a, b)]
