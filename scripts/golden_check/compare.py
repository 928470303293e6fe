"""Row by row comparison of what the reference computes with what the golden data holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

LIMIT = 1e-3  # norm of the difference over norm of the expected row


@dataclass(frozen=True)
class Group:
    """Tensors that come out of one run of the model, or of one function; a rounding tie moves them together."""

    case: str
    expected: Mapping[str, Tensor]  # [rows, ...] by what it is
    run: Callable[[], Mapping[str, Tensor]]  # computes the same
    limit: float = LIMIT
    by_median: bool = False  # judge the median of the rows, not the worst


@dataclass(frozen=True)
class Result:
    """One compared tensor: `error` is the worst row's, or the median."""

    case: str
    what: str
    error: float
    limit: float
    note: str = ""
    tie: str = ""  # the rounding ties that explain an error above the limit

    @property
    def ok(self) -> bool:
        """Within the limit, or shown to come from a tie. NaN is neither."""
        return self.error <= self.limit or bool(self.tie)


@dataclass
class Report:
    """All results, and what the directory holds that nothing compared."""

    results: list[Result] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was compared and all of it agrees."""
        return bool(self.results) and all(result.ok for result in self.results)


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative error of every row of [rows, ...], FP64 [rows].

    Rows of floats: norm of the difference over norm of the expected row. Rows of integers, which must be identical:
    1 if an entry differs, else 0. Infinite where the shapes differ.
    """
    if actual.shape != expected.shape:
        return torch.full((max(len(expected), 1),), torch.inf, dtype=torch.float64)
    rows = len(expected)
    if not expected.is_floating_point():
        return (actual != expected).reshape(rows, -1).any(-1).double()
    difference = (actual.double() - expected.double()).reshape(rows, -1).norm(dim=-1)
    return difference / expected.double().reshape(rows, -1).norm(dim=-1).clamp(min=1e-30)


def errors(group: Group, actual: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Row errors of every tensor of the group; a median counts as a single row."""
    found = {what: row_errors(actual[what], expected) for what, expected in group.expected.items()}
    return {what: rows.median()[None] for what, rows in found.items()} if group.by_median else found


def failing(group: Group, found: Mapping[str, Tensor]) -> set[tuple[str, int]]:
    """The rows (what, index) that exceed the limit; a row that holds NaN does."""
    return {(what, int(row)) for what, rows in found.items() for row in torch.nonzero(~(rows <= group.limit)).flatten()}


def results(group: Group, found: Mapping[str, Tensor], actual: Mapping[str, Tensor], tie: str) -> list[Result]:
    """One result for each tensor; `tie` is what explains the failing ones."""
    made = []
    for what, expected in group.expected.items():
        note = "median" if group.by_median else ""
        if actual[what].shape != expected.shape:
            note = f"shape {list(actual[what].shape)}, expected {list(expected.shape)}"
        worst = found[what].max().item() if len(found[what]) else 0.0
        made.append(Result(group.case, what, worst, group.limit, note, tie if not worst <= group.limit else ""))
    return made
