"""From a step's logits to its tokens: the one owner of all sampling state."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.core.batch import Batch
from deepinfer.core.plan import Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import Logprobs, Sampled, SampledRow, TokenMasks
from deepinfer.sampling.choices import Choice, Choices
from deepinfer.sampling.cutoffs import exclude
from deepinfer.sampling.logprobs import log_probabilities
from deepinfer.sampling.masks import apply_masks, byte_table
from deepinfer.sampling.penalties import Penalties
from deepinfer.sampling.random import Purpose, uniform
from deepinfer.sampling.transfer import floats, integers, to_device
from deepinfer.sampling.weights import first_largest, pick

_AT_ONCE = {"cpu": 2**19}
"""Log-weights worked on together: on a CPU as many as its caches hold, elsewhere so many that memory stays small."""

_LAST_RESORT = -1e30
"""Log-weight of an end that comes too early: it is taken only where nothing else is allowed."""

Places = npt.NDArray[np.intp]


class Sampler:
    """Draws the tokens of any mix of requests; a row's token does not depend, to the bit, on the other rows.

    `sample` is `adjust` and then `draw`; who verifies drafts calls these two with rows of its own.
    """

    def __init__(self, forbidden: Tensor, slots: int, eos: int) -> None:
        """`forbidden`: bool [vocab] on the device of the logits, the tokens that nobody may draw."""
        self._device, self._slots, self._eos = forbidden.device, slots, eos
        self._allowed = torch.zeros(len(forbidden), device=self._device).masked_fill_(forbidden, -torch.inf)
        self._bytes = byte_table(self._device)
        self._choices: dict[int, Choice] = {}
        self._changing: set[int] = set()  # requests that change logits of certain tokens
        self._penalties: Penalties | None = None
        self._penalised_slots: set[int] = set()
        self._newest: tuple[tuple[int, ...], Choices] | None = None
        self._at_once = max(1, _AT_ONCE.get(self._device.type, 2**24) // len(forbidden))

    @property
    def allowed(self) -> Tensor:
        """FP32 [vocab], added to all logits: -inf for what nobody may draw, else 0."""
        return self._allowed

    def admit(self, request_id: int, request: Request) -> None:
        """Take note of a request before its first row."""
        choice = Choice.of(request, self._eos, self._device)
        self._choices[request_id] = choice
        if choice.biased is not None or choice.ends is not None:
            self._changing.add(request_id)
        self._newest = None

    def forget(self, request_id: int) -> None:
        """Drop a request that no later row belongs to."""
        del self._choices[request_id]
        self._changing.discard(request_id)

    def read(self, spans: Sequence[Span], batch: Batch) -> None:
        """Take note of the rows that the model reads, for penalties; every row passes here once, drafts do not count.

        A request that begins again is counted again, from the tokens that it reads.
        """
        for span in spans:
            if span.first == span.floor:
                self._begin(span.slot, self._choices[span.request_id].request)
        if self._penalties is None or not any(span.slot in self._penalised_slots for span in spans):
            return
        certain = torch.ones_like(batch.ids, dtype=torch.bool)
        sampled = [span for span in spans if span.sample]
        drafts = np.array([place > 0 for span in sampled for place in range(1 + span.drafts)], dtype=np.bool_)
        if drafts.any():
            places = to_device(np.flatnonzero(drafts), self._device)
            certain[batch.decoder_rows[batch.sample_rows[places]]] = False
        self._penalties.read(batch.encoder.slots, batch.encoder.positions, batch.ids, certain)

    def accept(self, slots: Tensor, drafts: Tensor, accepted: Tensor) -> None:
        """Count drafts int64 [R, W] of requests in `slots` int64 [R] that turned out to be right, bool [R, W]."""
        if self._penalties is not None and self._penalised_slots:
            self._penalties.count(slots[:, None].expand_as(drafts), drafts, accepted)

    def sample(self, logits: Tensor, rows: Sequence[SampledRow], masks: TokenMasks | None = None) -> Sampled:
        """Draw a token a row of the FP32 `logits` [S, vocab], which are overwritten; nothing waits for the device."""
        places, tops = self.wanting_logprobs(rows)
        if not len(places):
            return Sampled(self.draw(self.adjust(logits, rows, masks), rows))
        index = to_device(places, self._device)
        plain = logits[index]
        tokens = self.draw(self.adjust(logits, rows, masks), rows)
        logprobs = self.logprobs(plain, tokens[index].clamp(min=0), tops)
        return Sampled(tokens, tuple(places.tolist()), logprobs)

    def wanting_logprobs(self, rows: Sequence[SampledRow]) -> tuple[Places, list[int]]:
        """The places of the rows whose requests ask for log-probabilities, and of how many likely tokens each."""
        tops = self._columns(rows).logprobs
        places = np.flatnonzero(tops >= 0)
        return places, tops[places].astype(int).tolist()

    def logprobs(self, logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> Logprobs:
        """Of `tokens` int64 [R] and of the `tops` most probable ones of FP32 logits [R, vocab], overwritten."""
        return log_probabilities(logits.add_(self._allowed), tokens, tops, self._at_once)

    def adjust(
        self,
        logits: Tensor,
        rows: Sequence[SampledRow],
        masks: TokenMasks | None = None,
        drafts: Tensor | None = None,
    ) -> Tensor:
        """The log-weights FP32 [S, vocab] by which tokens are drawn, up to a constant a row; -inf: never.

        In this order: tokens that nobody may draw, logit_bias, penalties (repetition, frequency, presence), min_tokens,
        grammars, temperature, top_k, top_p, min_p. Rows at temperature 0 stop before the temperature.
        logits: FP32 [S, vocab], overwritten. drafts: int64 [S, K], what row s takes for generated besides the tokens
        that `read` was told of; -1: none.
        """
        choices = self._columns(rows)
        logits.add_(self._allowed)
        self._add_bias(logits, rows)
        self._penalise(logits, rows, choices, drafts)
        self._put_off_ends(logits, rows)
        if masks is not None:
            apply_masks(logits, masks, self._bytes, self._at_once)
        for places, index in self._parts(choices.temperature > 0):
            part = logits[index]
            # In a row without an allowed token -inf has to stay.
            part -= part.amax(-1, keepdim=True).clamp_(min=torch.finfo().min)
            temperatures = choices.temperature[places]
            if (temperatures != 1).any():
                part /= floats(temperatures, self._device)[:, None]
            logits[index] = exclude(part, choices.limits(places))
        return logits

    def draw(self, log_weights: Tensor, rows: Sequence[SampledRow], purpose: Purpose = Purpose.SAMPLE) -> Tensor:
        """int64 [S]: the first of the heaviest tokens at temperature 0, else one drawn in proportion to its weight.

        log_weights: FP32 [S, vocab], as `adjust` returns them; a row without an allowed token, or with NaN, gives -1.
        The random number is counted by seed, position and purpose.
        """
        choices = self._columns(rows)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        for _, index in self._parts(choices.temperature == 0):
            tokens[index] = first_largest(log_weights[index])
        for places, index in self._parts(choices.temperature > 0):
            chosen = [rows[place] for place in places]
            seeds = [self._choices[row.request_id].request.seed for row in chosen]
            numbers = to_device(uniform(seeds, [row.position for row in chosen], purpose), self._device)
            tokens[index] = pick(log_weights[index], numbers)
        return torch.where(log_weights.amax(-1) > -torch.inf, tokens, -1) if rows else tokens

    def _begin(self, slot: int, request: Request) -> None:
        """The slot's counts are this request's from now on."""
        if request.params.penalises:
            if self._penalties is None:
                self._penalties = Penalties(self._slots, len(self._allowed), self._device)
            self._penalties.begin(slot, request)
            self._penalised_slots.add(slot)
        elif slot in self._penalised_slots and self._penalties is not None:
            self._penalties.begin(slot, None)
            self._penalised_slots.remove(slot)

    def _columns(self, rows: Sequence[SampledRow]) -> Choices:
        """What the rows' requests ask for; from step to step these are mostly the same."""
        ids = tuple(row.request_id for row in rows)
        newest = self._newest  # which another thread may drop meanwhile
        if newest is None or newest[0] != ids:
            newest = ids, Choices.of([self._choices[request_id].columns for request_id in ids])
            self._newest = newest
        return newest[1]

    def _parts(self, wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[Places, slice | Tensor]]:
        """The places of the wanted rows, some at a time, and the same as an index of tensors."""
        places = np.flatnonzero(wanted)
        for start in range(0, len(places), self._at_once):
            part = places[start : start + self._at_once]
            first, end = int(part[0]), int(part[-1]) + 1
            yield part, slice(first, end) if end - first == len(part) else to_device(part, self._device)

    def _changed(self, rows: Sequence[SampledRow]) -> Iterator[tuple[int, SampledRow]]:
        """The rows of requests that change logits of certain tokens, with their places."""
        changing = self._changing
        return ((place, row) for place, row in enumerate(rows) if row.request_id in changing) if changing else iter(())

    def _add_bias(self, logits: Tensor, rows: Sequence[SampledRow]) -> None:
        places, values = [], []
        for place, row in self._changed(rows):
            choice = self._choices[row.request_id]
            if choice.biased is not None and choice.bias is not None:
                places.append(choice.biased + place * logits.shape[-1])
                values.append(choice.bias)
        if places:
            logits.view(-1).index_add_(0, torch.cat(places), torch.cat(values))

    def _penalise(self, logits: Tensor, rows: Sequence[SampledRow], choices: Choices, drafts: Tensor | None) -> None:
        for places, index in self._parts(choices.penalised > 0):
            if self._penalties is None:
                raise ValueError("a row with penalties is sampled before `read` was told of it")
            columns = np.stack((choices.repetition[places], choices.frequency[places], choices.presence[places]))
            logits[index] = self._penalties.apply(
                logits[index],
                integers([rows[place].slot for place in places], self._device),
                floats(columns, self._device),
                None if drafts is None else drafts[index],
            )

    def _put_off_ends(self, logits: Tensor, rows: Sequence[SampledRow]) -> None:
        """Before a request has its fewest tokens, its ends come only where nothing else is allowed."""
        places = []
        for place, row in self._changed(rows):
            choice = self._choices[row.request_id]
            if choice.ends is not None and row.position < choice.free_from:
                places.append(choice.ends + place * logits.shape[-1])
        if places:
            every, flat = torch.cat(places), logits.view(-1)
            flat[every] = flat[every].clamp(max=_LAST_RESORT)
