"""Drafts blocks after the newest tokens and judges them: the one owner of all state of speculation on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.cache.storage import Caches
from deepinfer.core.batch import Half
from deepinfer.core.plan import Span
from deepinfer.core.request import Request
from deepinfer.core.sampled import Sampled, SampledRow, TokenMasks
from deepinfer.model.drafter import Anchors, Drafter
from deepinfer.model.recorder import Recorder
from deepinfer.sampling.choices import usable_temperature
from deepinfer.sampling.random import Purpose, uniform
from deepinfer.sampling.sampler import Sampler
from deepinfer.sampling.transfer import floats, integers, to_device
from deepinfer.sampling.weights import pick
from deepinfer.speculative.acceptance import accepted_counts, is_accepted, residual
from deepinfer.speculative.blocks import Blocks
from deepinfer.speculative.calibration import Calibration, survival
from deepinfer.speculative.drafting import draft
from deepinfer.speculative.layout import Layout
from deepinfer.speculative.recorded import Drawing, RecordedDrafts, is_plain, plain_choice
from deepinfer.speculative.schedule import share, share_on_device


@dataclass(frozen=True)
class Chosen:
    """Drafts that are to be verified, as the device alone knows. rows: of the step, those of newest tokens included."""

    layout: Layout
    rows: int


class Speculator:
    """Knows nothing of schedules: which rows are verified, and when blocks are drafted, is decided elsewhere."""

    def __init__(
        self, drafter: Drafter, sampler: Sampler, caches: Caches, calibration: Calibration, rejection: bool = False,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        """`rejection`: whether random requests are judged by that rule instead of equality.

        recorder: of blocks for plain requests; None: all are drafted as they come.
        """
        self._rejection = rejection
        self.drafter, self._sampler, self._caches, self._calibration = drafter, sampler, caches, calibration
        self.blocks = Blocks(caches.slots, drafter.block_size, drafter.device)
        self._requests: dict[int, Request] = {}
        self._simple: set[int] = set()  # requests of whose rows nothing is to be known but `plain_choice`
        self.recorded: RecordedDrafts | None = None  # None where blocks are drafted as they come
        if recorder is not None:
            temperatures = calibration.temperatures
            self.recorded = RecordedDrafts(drafter, caches, self.blocks, temperatures, sampler.allowed, recorder)

    @property
    def block_size(self) -> int:
        """Drafts of a block."""
        return self.drafter.block_size

    def admit(self, request_id: int, request: Request) -> None:
        """Take note of a request before its first row."""
        self._requests[request_id] = request
        plain = is_plain(request) and request.grammar is None and request.params.logprobs is None
        if plain and not self._may_reject(request_id):
            self._simple.add(request_id)

    def forget(self, request_id: int) -> None:
        """Drop a request that no later row belongs to."""
        del self._requests[request_id]
        self._simple.discard(request_id)
        self.blocks.fresh.discard(request_id)

    def remember(self, features: Tensor, half: Half) -> None:
        """Keep what later blocks need of the rows [M, F] that the decoder half has just run."""
        if len(features):
            self.drafter.remember(features, half, self._caches)

    def stated(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        """What is stated of each span's drafts, FP64 [R, G]: confidence logits, and survival."""
        slots = integers([span.slot for span in spans], self.drafter.device)
        return self.blocks.confidence[slots].double(), self.blocks.survival[slots]

    def trim(self, spans: Sequence[Span], total: int) -> list[Span]:
        """The spans with the `total` likeliest of their drafts."""
        drafted = [index for index, span in enumerate(spans) if span.drafts]
        most, trimmed = [spans[index].drafts for index in drafted], list(spans)
        if sum(most) > total:
            counts = [0] * len(drafted)
            if total > 0:  # else there is nothing to wait for
                slots = [spans[index].slot for index in drafted]
                chances = self.blocks.survival[integers(slots, self.drafter.device)].cpu().numpy()
                counts = share(chances, most, total)
            for index, count in zip(drafted, counts, strict=True):
                trimmed[index] = replace(spans[index], count=1 + count)
        return trimmed

    def sample(self, logits: Tensor, spans: Sequence[Span], masks: TokenMasks | None = None) -> Sampled:
        """The next tokens of spans of which some have drafts.

        logits: FP32 [S, vocab], overwritten: span by span that of the newest token and one behind each draft.
        masks: what grammars allow in them.
        """
        if self.recorded is not None and masks is None and all(span.request_id in self._simple for span in spans):
            return self.sample_chosen(logits, spans, Chosen(self._layout(spans), len(logits)))
        rows = [SampledRow(one, slot, first + place) for one, slot, first, drafts in _drawn(spans) for place in drafts]
        layout = self._layout(spans)
        places, tops = self._sampler.wanting_logprobs(rows)
        index = self._tensor(places)
        plain = logits[index] if tops else None
        weights = self._sampler.adjust(logits, rows, masks, layout.before)
        choices = self._sampler.draw(weights, rows)[layout.rows]
        agrees = layout.drafts == choices[:, :-1]
        random = [index for index, span in enumerate(spans) if span.drafts and self._may_reject(span.request_id)]
        if random:
            self._reject([(index, spans[index]) for index in random], weights, layout, agrees, choices)
        tokens, counts = self._judge(layout, agrees, choices)
        if plain is None:
            return Sampled(tokens, counts=counts)
        chosen = tokens[layout.owners, layout.places][index]
        logprobs = self._sampler.logprobs(plain, chosen.clamp(min=0), tops)
        owners = np.repeat(np.arange(len(spans)), [1 + span.drafts for span in spans])
        return Sampled(tokens, tuple(owners[places].tolist()), logprobs, counts)

    def choose(self, spans: Sequence[Span], total: int) -> Chosen | None:
        """As `trim`, on the device; None where `sample_chosen` could not go on, or if there is nothing to leave out."""
        most = [span.drafts for span in spans]
        if not 0 < total < sum(most) or not all(span.request_id in self._simple for span in spans):
            return None
        slots, limits = self._tensor(np.array([[span.slot for span in spans], most], dtype=np.int64))
        counts = share_on_device(self.blocks.survival[slots], limits, total)
        return Chosen(Layout.of(slots, counts, self.blocks.tokens, len(spans) + total, max(most)), len(spans) + total)

    def sample_chosen(self, logits: Tensor, spans: Sequence[Span], chosen: Chosen) -> Sampled:
        """As `sample`, for drafts that `choose` has chosen among those of `spans`; waits for nothing."""
        layout, drawing = chosen.layout, None
        requests = [self._requests[span.request_id] for span in spans]
        if any(one.params.temperature > 0 for one in requests):
            width = layout.rows.shape[1]
            first = [span.first + 1 for span in spans]
            numbers = self._numbers(requests, first, width)[layout.owners, layout.places]
            drawing = Drawing(self._temperatures(requests)[layout.owners], numbers[:, None])
        choices = plain_choice(logits.add_(self._sampler.allowed), drawing, 0)[layout.rows]
        tokens, counts = self._judge(layout, layout.drafts == choices[:, :-1], choices)
        return Sampled(tokens, counts=counts)

    def _layout(self, spans: Sequence[Span]) -> Layout:
        counts = [span.drafts for span in spans]
        slots, drafts = self._tensor(np.array([[span.slot for span in spans], counts], dtype=np.int64))
        return Layout.of(slots, drafts, self.blocks.tokens, len(spans) + sum(counts), max(counts))

    def _judge(self, layout: Layout, agrees: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [R, 1 + W], int64 [R]: the spans' tokens and how many they are.

        agrees: bool [R, W], drafts that the target accepts. choices: int64 [R, 1 + W], its own in their place.
        """
        drafts, accepted = layout.drafts, accepted_counts(agrees, layout.counts)
        inside = torch.arange(drafts.shape[1], device=drafts.device) < accepted[:, None]
        self._sampler.accept(layout.slots, drafts, inside)
        last = choices.gather(1, accepted[:, None])
        tokens = torch.cat((drafts, drafts[:, :1]), dim=1).scatter(1, accepted[:, None], last)
        return tokens, accepted + 1

    def _reject(
        self, random: Sequence[tuple[int, Span]], log_weights: Tensor, layout: Layout, agrees: Tensor, choices: Tensor
    ) -> None:
        """For the spans `random` set which drafts are accepted, and the choice in place of the first that is not.

        log_weights [S, vocab]: by which tokens are drawn where there are no drafts.
        """
        judged = [(index, place) for index, span in random for place in range(span.drafts)]
        owners, places = self._tensor(np.array(judged, dtype=np.int64).T)
        seeds = [self._requests[span.request_id].seed for _, span in random for _ in range(span.drafts)]
        positions = [span.first + 1 + place for _, span in random for place in range(span.drafts)]
        coins, others = (
            to_device(uniform(seeds, positions, purpose), self.drafter.device)
            for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL)
        )
        p, q = log_weights[layout.rows[owners, places]], self.blocks.log_weights(layout.slots[owners], places)
        accepted = is_accepted(layout.drafts[owners, places], p, q, coins)
        agrees[owners, places] = accepted
        # Behind the first rejected draft nothing counts, so each may have its token.
        choices[owners, places] = torch.where(accepted, choices[owners, places], pick(residual(p, q), others))

    def draft_ahead(self, spans: Sequence[Span], counts: Tensor | None) -> Tensor | None:
        """Draft a block behind each span's newest token before the host knows where that is.

        counts: int64 [R], the tokens that the spans gave; None: one each. Returns FP64 [R, G], the survival of the
        drafts; None, and nothing is done, if that cannot be: then `draft` has to be called, else `drafted`.
        """
        if self.recorded is None or not self.recorded.takes(len(spans)):
            return None
        requests = [self._requests[span.request_id] for span in spans]
        if not all(map(is_plain, requests)) or any(self._may_reject(span.request_id) for span in spans):
            return None
        depth = max(span.drafts for span in spans)
        least = [span.end - span.drafts for span in spans]  # where the newest token is if no draft was accepted
        fields = [(s.slot, at, max(s.floor, s.decoder_from), s.limit) for s, at in zip(spans, least, strict=True)]
        slots, positions, floors, limits = self._tensor(np.array(fields, dtype=np.int64).T)
        more = torch.zeros_like(slots) if counts is None else counts - 1
        positions = positions + more
        drawing = None
        if any(one.params.temperature > 0 for one in requests):
            drawing = self._drawing(requests, least, depth, more)
        self.recorded.run(slots, positions, floors, drawing)
        useful = positions < limits - 1
        return self.blocks.survival[slots].masked_fill(~useful[:, None], 0)

    def _drawing(self, requests: Sequence[Request], least: Sequence[int], depth: int, more: Tensor) -> Drawing:
        """How the target will draw the tokens behind the newest ones, which are `more` int64 [R] behind `least`."""
        numbers = self._numbers(requests, [at + 1 for at in least], depth + self.block_size)
        index = more[:, None] + torch.arange(self.block_size, device=more.device)
        return Drawing(self._temperatures(requests), numbers.gather(1, index))

    def _numbers(self, requests: Sequence[Request], first: Sequence[int], count: int) -> Tensor:
        """FP64 [R, count]: by which the target draws the tokens of each request from its `first` position on."""
        seeds = [one.seed for one in requests for _ in range(count)]
        positions = [at + place for at in first for place in range(count)]
        return to_device(uniform(seeds, positions, Purpose.SAMPLE), self.drafter.device).view(len(requests), count)

    def _temperatures(self, requests: Sequence[Request]) -> Tensor:
        return floats([usable_temperature(one.params.temperature) for one in requests], self.drafter.device)

    def drafted(self, spans: Sequence[Span], positions: Sequence[int]) -> None:
        """Take note of where the newest tokens were behind which `draft_ahead` has drafted."""
        for span, position in zip(spans, positions, strict=True):
            if position < span.limit - 1:
                self.blocks.fresh.add(span.request_id)
            else:
                self.blocks.fresh.discard(span.request_id)

    def draft(self, spans: Sequence[Span], newest: Tensor, positions: Sequence[int], wanted: bool) -> Tensor | None:
        """Draft a block behind each span's newest token, int64 [A] at `positions`; whatever was there is used up.

        Returns FP64 [A, G], the survival of the drafts; None if drafts are not wanted, or are of no use to any span:
        the last token of a request is never run, and nothing can be verified behind the one before it.
        """
        self.blocks.fresh.difference_update(span.request_id for span in spans)
        useful = [index for index, span in enumerate(spans) if positions[index] < span.limit - 1]
        if not wanted or not useful:
            return None
        chances = torch.zeros(len(spans), self.block_size, dtype=torch.float64, device=newest.device)
        index = integers(useful, newest.device)
        chances[index] = self._draft([spans[place] for place in useful], newest[index], [positions[p] for p in useful])
        return chances

    def _draft(self, spans: Sequence[Span], newest: Tensor, positions: Sequence[int]) -> Tensor:
        device = newest.device
        slots = integers([span.slot for span in spans], device)
        floors = integers([max(span.floor, span.decoder_from) for span in spans], device)
        anchors = Anchors(newest, integers(positions, device), slots, floors)
        random = [index for index, span in enumerate(spans) if self._may_reject(span.request_id)]
        seeds = [self._requests[spans[index].request_id].seed for index in random]
        picking = _Picking(self._sampler, spans, anchors, positions, random, seeds, self.block_size)
        made = draft(self.drafter, anchors, self._caches, picking)
        if picking.random:
            self.blocks.keep_log_weights(slots[integers(picking.random, device)], torch.stack(picking.log_weights, 1))
        chances = survival(made.confidence.double(), self._calibration.temperatures)
        self.blocks.put(slots, made, chances)
        self.blocks.fresh.update(span.request_id for span in spans)
        return chances

    def _may_reject(self, request_id: int) -> bool:
        return self._rejection and self._requests[request_id].params.temperature > 0

    def _tensor(self, values: npt.NDArray[np.int64]) -> Tensor:
        return to_device(values, self.drafter.device)


def _drawn(spans: Sequence[Span]) -> Iterator[tuple[int, int, int, range]]:
    """Of each span: request, slot, position of the token behind its newest one, and places of the tokens drawn."""
    for span in spans:
        drafts = span.drafts
        yield span.request_id, span.slot, span.end - drafts, range(1 + drafts)


class _Picking:
    """Chooses drafts from the drafter's logits as the sampler would choose tokens: the same log-weights, and the same
    random numbers where equality will decide; numbers of the drafts' own where they may be rejected.

    random: anchors of the latter kind. log_weights: [random, vocab] for each place, what their drafts were drawn from.
    """

    def __init__(
        self, sampler: Sampler, spans: Sequence[Span], anchors: Anchors, positions: Sequence[int],
        random: list[int], seeds: list[int], block: int,
    ) -> None:  # fmt: skip
        self._sampler, self._positions, self._spans = sampler, positions, spans
        self._made = [anchors.ids]
        self.random, self._equal = random, sorted(set(range(len(spans))) - set(random))
        self.log_weights: list[Tensor] = []
        count, device = len(self.random), anchors.ids.device
        places = [positions[index] + 1 + place for place in range(block) for index in self.random]
        laps = [place for place in range(block) for _ in range(count)]
        self._numbers = to_device(uniform(seeds * block, places, Purpose.DRAFT, laps), device).view(block, count)
        self._drawn, self._rest = integers(self.random, device), integers(self._equal, device)

    def __call__(self, logits: Tensor, place: int) -> Tensor:
        rows = [
            SampledRow(span.request_id, span.slot, position + 1 + place)
            for span, position in zip(self._spans, self._positions, strict=True)
        ]
        weights = self._sampler.adjust(logits, rows, drafts=torch.stack(self._made, 1))
        if not self.random:
            tokens = self._sampler.draw(weights, rows)
        else:
            self.log_weights.append(weights[self._drawn])
            tokens = torch.empty_like(self._made[0])
            tokens[self._drawn] = pick(self.log_weights[-1], self._numbers[place])
            if self._equal:
                kept = [rows[index] for index in self._equal]
                tokens[self._rest] = self._sampler.draw(weights[self._rest], kept)
        # Where no token is allowed the target will find none either.
        self._made.append(tokens.clamp(min=0))
        return self._made[-1]
