"""The rounds of an engine: counted for its report, and kept as the data that calibration is fitted to.

Only the host knows whose rounds count: a step may run rows of a request that has ended with the step before.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from deepinfer.core.plan import Span
from deepinfer.speculative.rounds import Round
from deepinfer.speculative.statistics import SpeculationStatistics


@dataclass(frozen=True)
class JudgedRound:
    """A request's round with the survival that its drafts were stated to have."""

    request_id: int
    round_: Round
    survival: Sequence[float]


@dataclass(frozen=True)
class Outcome:
    """What each of a step's sampled spans gave, and confidence logits and survival of its block."""

    tokens: Sequence[Sequence[int]]
    confidence: Sequence[Sequence[float]]
    survival: Sequence[Sequence[float]]


class RoundLog:
    """Holds the rounds of steps in flight until they come back."""

    def __init__(self, eos: int) -> None:
        """A request is taken to end with `eos`: of drafts behind it nothing is known."""
        self.statistics = SpeculationStatistics()
        self.kept: list[Round] | None = None  # what was asked to be kept
        self._eos = eos
        self._in_flight: dict[int, tuple[Sequence[Span], Callable[[], Outcome]]] = {}

    def ran(self, step: int, spans: Sequence[Span], outcome: Callable[[], Outcome]) -> None:
        """Take note of a step's sampled spans, and of what tells their outcome once the step has come back."""
        self._in_flight[step] = spans, outcome

    def landed(self, step: int, requests: Collection[int]) -> list[JudgedRound]:
        """The step came back, and gave tokens to these requests; returns their rounds."""
        judged = self._judged(*self._in_flight.pop(step)) if step in self._in_flight else []
        counted = [one for one in judged if one.request_id in requests]
        for one in counted:
            self.statistics.count(one.round_.judged, one.round_.accepted, one.survival)
            if self.kept is not None and one.round_.judged:
                self.kept.append(one.round_)
        return counted

    def _judged(self, spans: Sequence[Span], outcome: Callable[[], Outcome]) -> list[JudgedRound]:
        found = outcome()
        return [
            JudgedRound(span.request_id, round_of(span, made, logits, self._eos), chances)
            for span, made, logits, chances in zip(spans, found.tokens, found.confidence, found.survival, strict=True)
            if span.token_ids is None and made
        ]

    def forget(self) -> None:
        """Nothing is in flight any more."""
        self._in_flight.clear()


def round_of(span: Span, made: Sequence[int], logits: Sequence[float], eos: int) -> Round:
    """The round of a span that gave the tokens `made`."""
    ends = made.index(eos) + 1 if eos in made else None
    judged = span.drafts if ends is None else min(span.drafts, ends)
    emitted = len(made) if ends is None else ends
    return Round(span.first, min(len(made) - 1, judged), judged, emitted, tuple(logits))
