"""How far the drafter's confidence can be trusted, and the temperatures that mend it.

A confidence logit estimates the chance that a draft is accepted given that those before it were. What a scheduler
needs is the chance that the first k drafts all are: the product of the first k sigmoids. Sequential temperature scaling
divides the logit of each position by a temperature of its own, fitted from left to right so that this product is right.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.core.errors import CheckpointError
from deepinfer.speculative.rounds import Round

FILE = "dspark_calibration.json"
BINS = 20
TEMPERATURES = torch.logspace(math.log10(0.25), math.log10(4), 161, dtype=torch.float64)
"""Candidates of the fit, 1 among them."""


@dataclass(frozen=True)
class Observations:
    """Confidence and outcome of N rounds with blocks of G drafts.

    logits: FP64 [N, G], confidence logits as the drafter gives them.
    events: bool [N, G], whether the first k + 1 drafts were all accepted.
    known: bool [N, G], whether draft k lies inside the sequence; elsewhere the event is not defined.
    """

    logits: Tensor
    events: Tensor
    known: Tensor

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> "Observations":
        """Collect rounds (at least one, all of one block size)."""
        logits = torch.tensor([round_.confidence for round_ in rounds], dtype=torch.float64)
        place = torch.arange(logits.shape[1])
        accepted, judged = (
            torch.tensor([getattr(round_, name) for round_ in rounds])[:, None] for name in ("accepted", "judged")
        )
        return cls(logits, place < accepted, place < judged)


@dataclass(frozen=True)
class Errors:
    """Deviations of survival from what happened: over all positions pooled, and for each position."""

    ece: float
    brier: float
    ece_by_position: tuple[float, ...]


def survival(logits: Tensor, temperatures: Sequence[float] | Tensor) -> Tensor:
    """Chance that a block's first k + 1 drafts are all accepted: confidence logits [..., G] -> [..., G].

    ``temperatures`` are one positive number for each of the G positions. The result never increases along a block.
    """
    scale = torch.as_tensor(temperatures, dtype=logits.dtype, device=logits.device)
    return torch.sigmoid(logits / scale).cumprod(-1)


def expected_calibration_error(probability: Tensor, event: Tensor, bins: int = BINS) -> float:
    """Mean gap between stated and observed chance: probabilities [M] in 0 .. 1 and bool events [M] -> 0 .. 1.

    Probabilities fall into ``bins`` equal intervals; each interval's gap between mean probability and share of events
    counts by the number of its members. 0 if there are none at all.
    """
    if not probability.numel():
        return 0.0
    place = (probability * bins).long().clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64, device=place.device)
    gaps.index_add_(0, place, probability.double() - event.double())
    return float(gaps.abs().sum() / probability.numel())


def brier_score(probability: Tensor, event: Tensor) -> float:
    """Mean squared distance between probabilities [M] and bool events [M]; 0 if there are none."""
    return float((probability.double() - event.double()).square().sum() / max(probability.numel(), 1))


def errors(seen: Observations, temperatures: Sequence[float]) -> Errors:
    """How well survival with these temperatures agrees with what happened."""
    chance, known = survival(seen.logits, temperatures), seen.known
    columns = zip(chance.T, seen.events.T, known.T, strict=True)
    by_position = tuple(expected_calibration_error(p[here], event[here]) for p, event, here in columns)
    pooled = chance[known], seen.events[known]
    return Errors(expected_calibration_error(*pooled), brier_score(*pooled), by_position)


def fit_temperatures(seen: Observations) -> tuple[float, ...]:
    """Sequential temperature scaling: for each position, those before it fixed, the candidate of least error.

    Of candidates that are equally good the one nearest to 1 is taken; so 1 stays where a position was never seen.
    """
    before = torch.ones(len(seen.logits), dtype=torch.float64)
    by_distance = TEMPERATURES[TEMPERATURES.log().abs().argsort()]
    fitted: list[float] = []
    for logits, events, known in zip(seen.logits.T, seen.events.T, seen.known.T, strict=True):
        products = before * torch.sigmoid(logits / by_distance[:, None])  # [candidates, N]
        found = [expected_calibration_error(product[known], events[known]) for product in products]
        best = found.index(min(found))
        before = products[best]
        fitted.append(float(by_distance[best]))
    return tuple(fitted)


@dataclass(frozen=True)
class Calibration:
    """Temperatures of a checkpoint's confidence head, one a draft position, and where they come from.

    dataset, samples: what they were fitted on, and how many rounds that were; "" and 0 where nothing was fitted.
    ece_before, ece_after: pooled calibration error on those rounds without and with them; None where not measured.
    """

    temperatures: tuple[float, ...]
    dataset: str = ""
    samples: int = 0
    ece_before: float | None = None
    ece_after: float | None = None

    @classmethod
    def identity(cls, block_size: int) -> "Calibration":
        """Leave confidence as it is."""
        return cls((1.0,) * block_size)

    @classmethod
    def load(cls, directory: str | Path, block_size: int) -> "Calibration":
        """Read the file beside a checkpoint; without one confidence stays as it is. CheckpointError if it is broken."""
        path = Path(directory) / FILE
        if not path.exists():
            return cls.identity(block_size)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error}); {_takes(block_size)}") from error
        if not isinstance(data, dict) or not _are_temperatures(data.get("temperatures"), block_size):
            raise CheckpointError(f"{path}: {_takes(block_size)}")
        for key, (kinds, takes) in _NOTES.items():
            if key in data and not (isinstance(data[key], kinds) and not isinstance(data[key], bool)):
                raise CheckpointError(f"{path}: {key} is {data[key]!r:.80}; it takes {takes}")
        notes = {key: data[key] for key in _NOTES if key in data}
        return cls(tuple(map(float, data["temperatures"])), **notes)

    def save(self, directory: str | Path) -> Path:
        """Write the file beside a checkpoint and return its path."""
        path = Path(directory) / FILE
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path


_NOTES: dict[str, tuple[Any, str]] = {
    "dataset": (str, "text"),
    "samples": (int, "a whole number"),
    "ece_before": ((int, float, type(None)), "a number or null"),
    "ece_after": ((int, float, type(None)), "a number or null"),
}


def _takes(block_size: int) -> str:
    return f'expected {{"temperatures": [{block_size} positive numbers]}}, one for each token of a draft block'


def _are_temperatures(value: object, block_size: int) -> bool:
    if not isinstance(value, list) or len(value) != block_size:
        return False
    numbers = [one for one in value if isinstance(one, int | float) and not isinstance(one, bool)]
    return len(numbers) == block_size and all(0 < one <= sys.float_info.max for one in numbers)


def fit(rounds: Sequence[Round], dataset: str) -> "tuple[Calibration, Errors, Errors]":
    """Temperatures fitted on `rounds`, and the errors on them before and after."""
    seen = Observations.of(rounds)
    temperatures = fit_temperatures(seen)
    before = errors(seen, Calibration.identity(len(temperatures)).temperatures)
    after = errors(seen, temperatures)
    return Calibration(temperatures, dataset, len(rounds), before.ece, after.ece), before, after


def report(calibration: Calibration, before: Errors, after: Errors) -> str:
    """A line for each position of a block, and one for all together."""
    columns = zip(calibration.temperatures, before.ece_by_position, after.ece_by_position, strict=True)
    lines = [f"{calibration.samples} rounds of {calibration.dataset}", "drafts  temperature  ECE before  ECE after"]
    lines += [f"{k:6}  {t:11.3f}  {one:10.4f}  {two:9.4f}" for k, (t, one, two) in enumerate(columns, 1)]
    lines.append(f"   all               {before.ece:10.4f}  {after.ece:9.4f}")
    return "\n".join(lines)
