"""The matchers of running requests, and masks that are filled while the model runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.core.plan import Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import SampledRow, TokenMasks
from deepinfer.sampling.grammar.matcher import Matcher, blank


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


@dataclass
class _Held:
    """A constrained request: its matcher, where its reply begins, and the newest token drawn for it."""

    matcher: Matcher
    prompt: int
    newest: tuple[int, HostTokens, int] | None = None
    error: Exception | None = None


class Grammars:
    """Owns the matchers of constrained requests; others cost it one look-up a step.

    `start` is called with a step's spans before the model runs and its result waited for afterwards; `sampled` with
    what was drawn. Both on the runner's thread, in the order of the steps; the filling itself has its own.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        """`words`: words of 32 bits of a mask over the model's vocabulary."""
        self._words, self._device = words, device
        self._held: dict[int, _Held] = {}
        self._filler: ThreadPoolExecutor | None = None

    def admit(self, request_id: int, request: Request) -> None:
        """Take note of a request before its first row; nothing is kept of one without a grammar."""
        if request.grammar is not None:
            self._held[request_id] = _Held(request.grammar.matcher(), len(request.token_ids))

    def forget(self, request_id: int) -> None:
        """Drop a request that no later step runs."""
        self._held.pop(request_id, None)

    def start(self, spans: Sequence[Span]) -> "Future[TokenMasks] | None":
        """Begin to fill the masks of a step's sampled rows; None, at once, if none of its requests has a grammar.

        A request whose matcher fails gets an empty mask, so that no token can be drawn for it.
        """
        if not self._held or not any(span.request_id in self._held for span in spans):
            return None
        self._filler = self._filler or ThreadPoolExecutor(1, "deepinfer-masks")
        return self._filler.submit(self._fill, spans)

    def on_device(self, masks: TokenMasks) -> TokenMasks:
        """The masks on the device of the logits."""
        if self._device.type == "cpu":
            return masks
        rows, bits = (one.to(self._device, non_blocking=True) for one in (masks.rows, masks.bits))
        return TokenMasks(rows, bits)

    def sampled(self, rows: Sequence[SampledRow], tokens: Tensor) -> None:
        """Take note of the tokens int64 [S] drawn for `rows`; they are read when the next step needs them."""
        if not any(row.request_id in self._held for row in rows):
            return
        copied = HostTokens(tokens)
        for place, row in enumerate(rows):
            if row.request_id in self._held:
                held = self._held[row.request_id]
                held.newest = row.position - held.prompt, copied, place

    def _fill(self, spans: Sequence[Span]) -> TokenMasks:
        sampled = [span for span in spans if span.sample]
        rows = [place for place, span in enumerate(sampled) if span.request_id in self._held]
        bits = blank(len(rows), self._words, self._device.type == "cuda")
        for span in spans:
            if span.request_id in self._held and not span.sample:
                self._follow(self._held[span.request_id], span)
        for line, place in enumerate(rows):
            held = self._held[sampled[place].request_id]
            self._follow(held, sampled[place])
            row = bits[line : line + 1]
            if held.error is None:
                held.matcher.fill(row)
            else:
                row.zero_()
        return TokenMasks(torch.tensor(rows, dtype=torch.int64), bits)

    def _follow(self, held: _Held, span: Span) -> None:
        """Bring a matcher to the end of its request's span, whatever it has taken before."""
        try:
            self._take(held, span)
            held.error = None
        except Exception as error:  # one request's trouble, whatever it is, is not the others'
            held.error = error

    def _take(self, held: _Held, span: Span) -> None:
        first = span.first - held.prompt
        if span.token_ids is not None:
            for place, token in enumerate(span.token_ids, first):
                if place >= 0:
                    held.matcher.put(place, token)
        else:
            if held.newest is None or held.newest[0] != first:
                raise ValueError(f"the token at place {first} of the reply is not known")
            _, tokens, row = held.newest
            held.matcher.put(first, tokens[row])
        held.matcher.rewind(max(0, span.end - held.prompt))
