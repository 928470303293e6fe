"""What is drawn in a step, and for whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from torch import Tensor

from deepinfer.core.arriving import Arriving
from deepinfer.core.outputs import TokenLogprobs


class SampledRow(NamedTuple):
    """One row of logits that gives a token.

    slot: the request's slot in this step. position: of the token to be drawn, counted from the request's first token.
    """

    request_id: int
    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens the grammars of C rows allow; the other rows of the step are free.

    rows: int64 [C], their places among the step's sampled rows, ascending.
    bits: int32 [C, ceil(vocab / 32)]; bit t % 32 of word t // 32 says whether token t may come.
    """

    rows: Tensor
    bits: Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of R tokens and of the most probable ones in their places, still on the device.

    tops: how many of those each row asked for. chosen: FP64 [R]. top: FP64 [R, K], highest first, and ids: int64
    [R, K], for the largest of `tops` or the vocabulary, if that is smaller.
    """

    tops: tuple[int, ...]
    chosen: Tensor
    top: Tensor
    ids: Tensor

    def to_host(self) -> list[TokenLogprobs]:
        """One a row; waits for the device."""
        found = []
        rows = zip(self.tops, self.chosen.tolist(), self.ids.tolist(), self.top.tolist(), strict=True)
        for count, chosen, ids, top in rows:
            best = zip(ids[:count], top, strict=False)
            found.append(TokenLogprobs(chosen, {token: value for token, value in best if value > -inf}))
        return found


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a request's prompt tokens at positions `first`, `first` + 1, ..."""

    request_id: int
    first: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next tokens of a step's S sampled spans, in the plan's order, still on the device; -1: none was allowed.

    tokens: int64 [S], or [S, 1 + most drafts] with as many of them valid as `counts`, int64 [S], says: accepted drafts,
    then one that the target chose itself. 0 for a request that has all its tokens already.
    logprobs: of those spans that asked for them, as `logprob_rows` says: the place of a span once for each of its
    tokens, ascending, and for tokens that are not valid perhaps some more.
    survival: FP64 [S, G], for each draft of the blocks drafted after the last tokens the chance that it and all before
    it will be accepted; None where nothing was drafted.
    prompts: log-probabilities of prompt tokens that rows of this step come before.
    failures: requests whose images could not be encoded or whose grammars could not be followed, and why; what the step
    computed for them means nothing.
    arriving: by name, which of the tensors are on their way to the host.
    """

    tokens: Tensor
    logprob_rows: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    counts: Tensor | None = None
    survival: Tensor | None = None
    prompts: tuple[PromptLogprobs, ...] = ()
    failures: Mapping[int, Exception] = field(default_factory=dict)
    arriving: Mapping[str, Arriving] = field(default_factory=dict)

    def sent(self) -> "Sampled":
        """The same on its way to the host, so that to read it waits for no later step."""
        tensors = {"tokens": self.tokens, "counts": self.counts, "survival": self.survival}
        begun = {
            name: self.arriving.get(name) or Arriving(values) for name, values in tensors.items() if values is not None
        }
        return replace(self, arriving=begun)

    def lists(self) -> list[list[int]]:
        """The valid tokens of each span; waits for the device."""
        if self.counts is None:
            return [[token] for token in self._host("tokens", self.tokens).tolist()]
        rows = self._host("tokens", self.tokens).view(len(self.counts), -1).tolist()
        return [row[:count] for row, count in zip(rows, self.host_counts(), strict=True)]

    def host_counts(self) -> list[int]:
        """How many valid tokens each span has; waits for the device, if there were drafts."""
        if self.counts is None:
            return [1] * len(self.tokens)
        counts: list[int] = self._host("counts", self.counts).tolist()
        return counts

    def chances(self) -> list[list[float]] | None:
        """`survival` as lists; waits for the device."""
        found: list[list[float]] | None = None
        if self.survival is not None:
            found = self._host("survival", self.survival).tolist()
        return found

    def _host(self, name: str, values: Tensor) -> Tensor:
        return self.arriving[name].get() if name in self.arriving else values
