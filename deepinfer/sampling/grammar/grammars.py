"""The matchers of running requests, and masks that are filled while the model runs."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.core.errors import EngineError
from deepinfer.core.plan import Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import TokenMasks
from deepinfer.sampling.grammar.matcher import Matcher, blank

MOST_HELPERS = 16
"""Threads that fill masks at most."""


class HostTokens:
    """A step's tokens on their way to the host; the copy is started at once and waited for when it is read."""

    def __init__(self, tokens: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.device.type == "cuda":
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def __getitem__(self, place: int) -> int:
        if self._event is not None:
            self._event.synchronize()
        return int(self._tokens[place])


@dataclass(frozen=True)
class _Newest:
    """The tokens that a step gave a request: `count` of `tokens` from `row` on, the first at `place` of the reply."""

    place: int
    tokens: HostTokens
    row: int
    count: int


@dataclass
class _Held:
    """A constrained request: its matcher, where its reply begins, and the newest tokens drawn for it."""

    matcher: Matcher
    prompt: int
    newest: _Newest | None = None
    error: Exception | None = None


class Grammars:
    """Owns the matchers of constrained requests; others cost it one look-up a step.

    `start` is called with a step's spans before the model runs and its masks waited for afterwards; `sampled` with
    what was drawn. Both on the runner's thread, in the order of the steps; the filling itself has its own.
    """

    def __init__(self, words: int, device: torch.device, helpers: int | None = None) -> None:
        """`words`: words of 32 bits of a mask over the model's vocabulary.

        helpers: threads that fill the masks of different requests at the same time; by default one where the model
        itself runs on the processor, else as many as there are cores, up to `MOST_HELPERS`.
        """
        if helpers is None:
            helpers = 1 if device.type == "cpu" else min(MOST_HELPERS, os.cpu_count() or 1)
        self._words, self._device = words, device
        self._held: dict[int, _Held] = {}
        self._filler: ThreadPoolExecutor | None = None
        self._filling: Future[TokenMasks] | None = None
        self._helpers: ThreadPoolExecutor | None = None
        if helpers > 1:
            self._helpers = ThreadPoolExecutor(helpers, "deepinfer-mask-rows")

    def admit(self, request_id: int, request: Request) -> None:
        """Take note of a request before its first row; nothing is kept of one without a grammar."""
        if request.grammar is not None:
            self._held[request_id] = _Held(request.grammar.matcher(), len(request.token_ids))

    def forget(self, request_id: int) -> None:
        """Drop a request that no later step runs."""
        self._held.pop(request_id, None)

    def start(
        self, spans: Sequence[Span], drafts: Callable[[Span], Sequence[int]]
    ) -> "tuple[Sequence[Span], Future[TokenMasks] | None]":
        """Begin to fill the masks of a step's sampled rows; None, at once, if none of its requests has a grammar.

        `drafts` gives those that a span verifies. Spans come back without the drafts behind the first illegal one,
        which itself has to stay: whether a draft is judged must not depend on what it is.
        A request whose matcher fails gets an empty mask, so that no token can be drawn for it.
        """
        if not any(span.request_id in self._held for span in spans):
            return spans, None
        if self._filling is not None:
            wait([self._filling])  # a step that failed did not
        legal: dict[int, Sequence[int]] = {}
        cut = [self._cut(span, drafts, legal) for span in spans]
        self._filler = self._filler or ThreadPoolExecutor(1, "deepinfer-masks")
        self._filling = self._filler.submit(self._fill, cut, legal)
        return cut, self._filling

    def on_device(self, masks: TokenMasks) -> TokenMasks:
        """The masks on the device of the logits."""
        if self._device.type == "cpu":
            return masks
        rows, bits = (one.to(self._device, non_blocking=True) for one in (masks.rows, masks.bits))
        return TokenMasks(rows, bits)

    def sampled(self, spans: Sequence[Span], tokens: Tensor, counts: Sequence[int]) -> None:
        """Take note of the tokens int64 [R] or [R, W] drawn for `spans`, of which each has `counts`.

        They are read when the next step needs them.
        """
        if not any(span.request_id in self._held for span in spans):
            return
        width = tokens.numel() // len(spans)
        copied = HostTokens(tokens.flatten())
        for place, (span, count) in enumerate(zip(spans, counts, strict=True)):
            if span.request_id in self._held:
                held = self._held[span.request_id]
                held.newest = _Newest(span.end - span.drafts - held.prompt, copied, place * width, count)

    def failures(self, spans: Sequence[Span]) -> dict[int, EngineError]:
        """The requests among `spans` whose matchers failed by the time the step's masks were there, and why."""
        if not self._held:
            return {}
        held = {span.request_id: self._held[span.request_id] for span in spans if span.request_id in self._held}
        return {request_id: _failure(one.error) for request_id, one in held.items() if one.error is not None}

    def _cut(self, span: Span, drafts: Callable[[Span], Sequence[int]], legal: dict[int, Sequence[int]]) -> Span:
        """The span without the drafts behind its first illegal one; those before that are noted in `legal`."""
        held = self._held.get(span.request_id)
        if held is None or not span.drafts:
            return span
        proposed = drafts(span)
        kept = legal[span.request_id] = self._legal(held, span, proposed)
        return span if held.error is not None else replace(span, count=min(span.count, len(kept) + 2))

    def _fill(self, spans: Sequence[Span], legal: Mapping[int, Sequence[int]]) -> TokenMasks:
        """Runs on the filler's thread, while the model runs the spans."""
        rows: list[int] = []
        jobs: list[tuple[_Held, Span, Sequence[int] | None, Tensor]] = []
        row = 0
        held_rows = sum(1 + span.drafts for span in spans if span.sample and span.request_id in self._held)
        bits = blank(held_rows, self._words, self._device.type == "cuda")
        for span in spans:
            count = (1 + span.drafts) if span.sample else 0
            held = self._held.get(span.request_id)
            if held is not None:
                jobs.append((held, span, legal.get(span.request_id), bits[len(rows) : len(rows) + count]))
                rows += range(row, row + count)
            row += count
        if self._helpers is None:
            for job in jobs:
                self._fill_span(*job)
        else:
            list(self._helpers.map(lambda job: self._fill_span(*job), jobs))
        return TokenMasks(torch.tensor(rows, dtype=torch.int64), bits)

    def _fill_span(self, held: _Held, span: Span, legal: Sequence[int] | None, bits: Tensor) -> None:
        """`legal`: the drafts that may come, if the matcher has followed already; masks behind others are not used."""
        with _failing_alone(held):
            if legal is None:
                held.error = None
                self._take(held, span)
            if span.sample and held.error is None:
                held.matcher.walk(legal or (), bits)
        if held.error is not None:
            bits.zero_()

    def _legal(self, held: _Held, span: Span, drafts: Sequence[int]) -> Sequence[int]:
        held.error = None
        with _failing_alone(held):
            self._take(held, span)
            return drafts[: held.matcher.legal(drafts)]
        return ()

    def _take(self, held: _Held, span: Span) -> None:
        """Bring a matcher to the end of its request's span, whatever it has taken before."""
        first = span.first - held.prompt
        if span.token_ids is not None:
            for place, token in enumerate(span.token_ids, first):
                if place >= 0:
                    held.matcher.put(place, token)
        else:
            newest = held.newest
            if newest is None or newest.place + newest.count - 1 != first:
                raise ValueError(f"the token at place {first} of the reply is not known")
            for index in range(newest.count):
                held.matcher.put(newest.place + index, newest.tokens[newest.row + index])
        held.matcher.rewind(max(0, span.end - span.drafts - held.prompt))


@contextmanager
def _failing_alone(held: _Held) -> Iterator[None]:
    """Whatever one request's matcher raises is its own trouble, not the others'."""
    try:
        yield
    except Exception as error:
        held.error = error


def _failure(error: Exception) -> EngineError:
    return EngineError(f"the request's grammar could not be followed: {type(error).__name__}: {error}")
