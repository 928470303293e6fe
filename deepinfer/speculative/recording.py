"""What an engine's rounds say about confidence: the data that calibration is fitted to."""

from collections.abc import Sequence

from deepinfer.core.plan import Span
from deepinfer.speculative.rounds import Round


def recorded_rounds(
    spans: Sequence[Span], tokens: Sequence[Sequence[int]], confidence: Sequence[Sequence[float]], eos: int
) -> list[Round]:
    """The rounds of the spans that verified drafts.

    tokens: what each gave. confidence: logits of its block. A request is taken to end with `eos`: of drafts behind it
    nothing is known.
    """
    rounds = []
    for span, made, logits in zip(spans, tokens, confidence, strict=True):
        if span.drafts:
            ends = made.index(eos) + 1 if eos in made else span.drafts
            judged = min(span.drafts, ends)
            accepted = min(len(made) - 1, judged)
            rounds.append(Round(span.first, accepted, judged, min(len(made), ends + (eos not in made)), tuple(logits)))
    return rounds
