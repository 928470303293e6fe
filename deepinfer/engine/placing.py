"""Where the rows of a plan really lie, once all steps before it are known."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deepinfer.core.plan import Plan, Span
from deepinfer.core.sampled import Sampled


class Places:
    """Knows the position of each request's newest token, which has been sampled and has yet to run.

    A plan is made while the step before it runs, and only that step settles how many drafts are accepted. So the plan
    reserves rows and pages for the most that there can be, and names the least position; whoever carries plans out, in
    their order, looks here for the real ones. Nothing has to be planned again, and the scheduler waits for nothing.
    """

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def spans(self, plan: Plan, drafted: Collection[int]) -> list[Span]:
        """The plan's spans as they are to run; `drafted`: the requests that have a block behind their newest token.

        Left out are spans of requests that turn out to have all their tokens, or whose newest token is unknown because
        the step that was to sample it failed.
        """
        found = []
        for span in plan.spans:
            if span.first == span.floor:  # it begins in this slot, perhaps for the second time
                self.forget(span.request_id)
            if span.token_ids is None:
                position = self._newest.get(span.request_id, span.limit)
                if position >= span.limit:
                    continue
                drafts = min(span.drafts, span.limit - 1 - position) if span.request_id in drafted else 0
                span = replace(span, first=position, count=1 + drafts)
            found.append(span)
        return found

    def advance(self, spans: Sequence[Span], counts: Sequence[int]) -> list[int]:
        """Take note of how many tokens the sampled `spans` gave; returns the positions of the newest ones."""
        positions = [span.end - span.drafts - 1 + count for span, count in zip(spans, counts, strict=True)]
        self._newest.update((span.request_id, place) for span, place in zip(spans, positions, strict=True))
        return positions

    def forget(self, request_id: int) -> None:
        """Nothing is known of the request any more."""
        self._newest.pop(request_id, None)


def among(plan: Plan, spans: Sequence[Span], sampled: Sampled) -> Sampled:
    """What those `spans` gave that ran, among all sampled spans of their plan; the others gave no token."""
    there = {span.request_id for span in spans}
    wanted = [span.request_id for span in plan.spans if span.sample]
    places = [place for place, request_id in enumerate(wanted) if request_id in there]
    index = torch.tensor(places, dtype=torch.int64, device=sampled.tokens.device)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(len(wanted), *values.shape[1:]).index_copy_(0, index, values)

    counts = torch.ones_like(index) if sampled.counts is None else sampled.counts
    return replace(
        sampled,
        tokens=spread(sampled.tokens if sampled.tokens.dim() == 2 else sampled.tokens[:, None]),
        logprob_rows=tuple(places[row] for row in sampled.logprob_rows),
        counts=spread(counts),
        survival=None if sampled.survival is None else spread(sampled.survival),
        arriving={},
    )
