"""Which implementation of an operator runs: the fast one, or the batch-invariant one.

Both mean the same; they may differ in the order of sums, so in the last bits. What is chosen holds for a thread's calls
inside `batch_invariant`, so engines of both kinds can live in one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_INVARIANT: ContextVar[bool] = ContextVar("batch_invariant", default=False)


@contextmanager
def batch_invariant(wanted: bool = True) -> Iterator[None]:
    """Operators called within give a row the same bits whatever other rows there are, if `wanted`."""
    token = _INVARIANT.set(wanted)
    try:
        yield
    finally:
        _INVARIANT.reset(token)


def choose(fast: Callable[P, R], invariant: Callable[P, R]) -> Callable[P, R]:
    """The operator that is `invariant` inside `batch_invariant` and `fast` elsewhere."""

    @wraps(fast)
    def operator(*args: P.args, **kwargs: P.kwargs) -> R:
        return (invariant if _INVARIANT.get() else fast)(*args, **kwargs)

    return operator
