"""The measured table: values, the bounds they are held to, and how they are shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measured value. `at_least` says on which side of the bound it must lie; a row without bound informs only."""

    key: str
    name: str
    value: float
    bound: float | None = None
    at_least: bool = True
    percent: bool = False
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the value keeps its bound."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "key": self.key,
            "name": self.name,
            "value": self.value,
            "bound": self.bound,
            "at_least": self.at_least,
            "passed": self.passed,
            "note": self.note,
        }


def show(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown, with bounds and verdicts."""
    lines = ["| what | measured | bound | | how much |", "|---|---|---|---|---|"]
    for row in rows:
        bound = "" if row.bound is None else f"{'≥' if row.at_least else '≤'} {_number(row.bound, row.percent)}"
        verdict = "" if row.bound is None else "pass" if row.passed else "MISSED"
        lines.append(f"| {row.name} | {_number(row.value, row.percent)} | {bound} | {verdict} | {row.note} |")
    return "\n".join(lines)


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f}%" if percent else f"{value:.3f}"
