"""What rounds cost: measured once for a platform and model, kept beside the checkpoint, corrected while running."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.core.errors import CheckpointError

FILE = "dspark_round_times.json"
_MEMORY = 0.8
_CREDIBLE = 0.25, 8.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """Seconds that steps took.

    rows, verify: numbers of rows, ascending, and the time of the target over so many. requests, draft: numbers of
    requests, and the time to draft a block for each of so many.
    """

    rows: tuple[int, ...]
    verify: tuple[float, ...]
    requests: tuple[int, ...]
    draft: tuple[float, ...]


class RoundTimes:
    """Times of rounds of any size, from those measured; between them on straight lines, never falling.

    What steps really take, sampling and all, corrects it: each measured size has a factor of its own, an average over
    past steps in which older ones count for less. Sizes that were never seen share the factor of all.
    """

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self._rows = np.asarray(measured.rows, dtype=np.float64)
        self._verify = np.maximum.accumulate(np.asarray(measured.verify, dtype=np.float64))
        self._requests = np.asarray(measured.requests, dtype=np.float64)
        self._draft = np.maximum.accumulate(np.asarray(measured.draft, dtype=np.float64))
        self._factors = np.ones(len(self._rows))
        self._seen = np.zeros(len(self._rows), dtype=np.bool_)
        self._usual = 1.0

    def verify(self, rows: Floats) -> Floats:
        """Seconds of the target over so many rows in all."""
        factors = np.where(self._seen, self._factors, self._usual)
        return _line(rows, self._rows, self._verify) * np.interp(rows, self._rows, factors)

    def draft(self, requests: int) -> float:
        """Seconds to draft a block for so many requests."""
        return float(_line(np.array([requests], dtype=np.float64), self._requests, self._draft)[0])

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Take note of a step over `rows` rows in all that drafted blocks for `drafted` requests."""
        rest = seconds - (self.draft(drafted) if drafted else 0.0)
        expected = float(_line(np.array([rows], dtype=np.float64), self._rows, self._verify)[0])
        factor = min(max(rest / expected, _CREDIBLE[0]), _CREDIBLE[1])
        place = int(np.abs(self._rows - rows).argmin())
        before = self._factors[place] if self._seen[place] else factor
        self._factors[place] = _MEMORY * before + (1 - _MEMORY) * factor
        self._seen[place] = True
        self._usual = float(self._factors[self._seen].mean())


def _line(at: Floats, places: Floats, values: Floats) -> Floats:
    """Values between the places, and beyond the last one in proportion."""
    found: Floats = np.interp(at, places, values) * np.maximum(1.0, at / places[-1])
    return found


def load_times(directory: Path, platform: str) -> Measured | None:
    """The times kept for this platform; None if there are none. CheckpointError for a broken file."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["platforms"].get(platform)
        return None if kept is None else _checked(kept)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: is no table of round times ({error}); `deepinfer profile` writes one"
        ) from error


def save_times(directory: Path, platform: str, measured: Measured) -> Path:
    """Keep the times of this platform, beside those of others; returns the file's path."""
    path = directory / FILE
    kept: dict[str, Any] = {}
    if path.exists():
        try:
            kept = dict(json.loads(path.read_text(encoding="utf-8"))["platforms"])
        except (OSError, ValueError, TypeError, KeyError):
            kept = {}  # broken: replaced
    kept[platform] = asdict(measured)
    path.write_text(json.dumps({"platforms": kept}, indent=1) + "\n", encoding="utf-8")
    return path


def _checked(kept: Any) -> Measured:
    columns = {name: tuple(map(kind, kept[name])) for name, kind in _COLUMNS.items()}
    for sizes, times in (("rows", "verify"), ("requests", "draft")):
        ascending = all(a < b for a, b in zip(columns[sizes], columns[sizes][1:], strict=False))
        if not columns[sizes] or len(columns[sizes]) != len(columns[times]) or not ascending:
            raise ValueError(f"{sizes} and {times} take as many numbers each, the sizes ascending")
        if min(columns[times]) <= 0 or min(columns[sizes]) < 1:
            raise ValueError(f"{sizes} and {times} take positive numbers")
    return Measured(**columns)


_COLUMNS: dict[str, type] = {"rows": int, "verify": float, "requests": int, "draft": float}
