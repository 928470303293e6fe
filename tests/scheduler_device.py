"""A simulated model and device that know nothing of the scheduler and object to every row whose inputs are absent.

The model is a chain of checksums: the value at a position depends on all tokens up to it, and decides the next token.
Global KV, windows and pairs hold these values, so anything stale, foreign or never written is noticed when it is read.
Its drafter looks ahead along the chain and errs now and then; what verified rows leave behind stays there like garbage.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from deepinfer.core.plan import Plan, Span
from deepinfer.core.request import Request

STOP = 0
VOCABULARY = 29
GARBAGE = -1


def chain(before: int, token: int) -> int:
    """The model's value at a position, from the value before it."""
    return crc32(token.to_bytes(4, "little"), before)


def reply(prompt: tuple[int, ...], most: int, stops: frozenset[int] = frozenset({STOP})) -> list[int]:
    """What a request must generate, whatever else runs: computed from its tokens alone."""
    value = 0
    for token in prompt:
        value = chain(value, token)
    tokens: list[int] = []
    while len(tokens) < most:
        tokens.append(value % VOCABULARY)
        if tokens[-1] in stops:
            break
        value = chain(value, tokens[-1])
    return tokens


@dataclass
class Slot:
    """Per-slot state: rings of (position, value), the newest token and drafts behind it, the page table's row."""

    request_id: int | None = None
    end: int = 0
    newest: int = GARBAGE
    sampled: bool = False
    drafts: list[int] = field(default_factory=list)
    pairs: dict[int, tuple[int, int]] = field(default_factory=dict)
    encoder: dict[int, tuple[int, int]] = field(default_factory=dict)
    decoder: dict[int, tuple[int, int]] = field(default_factory=dict)
    pages: tuple[int, ...] = ()


class Device:
    """Carries out plans in their order, checking that each row finds what it reads."""

    def __init__(self, slots: int, pages: int, page_size: int, window: int, depth: int = 0, errs: int = 3) -> None:
        """Blocks of `depth` drafts, of which one in `errs` is wrong (0: all are right, 1: none)."""
        self.depth, self.errs = depth, errs
        self.ring, self.pair_ring = window + depth, (depth + 3) // 2
        self.accepted = self.verified = 0
        self.slots = [Slot() for _ in range(slots)]
        self.pages = [[GARBAGE] * page_size for _ in range(pages)]
        self.page_size = page_size
        self.window = window
        self.next_number = 0
        self.spoiled: set[int] = set()
        self.requests: dict[int, Request] = {}

    def run(self, plan: Plan, broken: bool = False) -> dict[int, list[int]]:
        """Carry out a plan and return the sampled tokens; a broken one leaves garbage wherever it may write."""
        assert plan.number == self.next_number
        self.next_number += 1
        for slot, pages in plan.pages.items():
            self.slots[slot].pages = pages
        for load in plan.loads:
            stored = struct.unpack(f"{self.page_size}q", load.data)
            self.pages[load.page] = [GARBAGE] * self.page_size if broken else list(stored)
        tokens, left = {}, self.depth * len(plan.spans) if plan.verified is None else plan.verified
        for span in plan.spans:
            if span.first == span.floor:
                self.spoiled.discard(span.request_id)
            if broken:
                self.spoiled.add(span.request_id)
            if span.request_id in self.spoiled:
                self._spoil(span)
                tokens[span.request_id] = [GARBAGE]
            elif span.token_ids is None:
                verified = self.verified
                tokens[span.request_id] = self._decode(span, left, plan.drafting)
                left -= self.verified - verified
            else:
                tokens[span.request_id] = self._run(span, plan.drafting)
        return {span.request_id: tokens[span.request_id] for span in plan.spans if span.sample}

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """Copy pages out, for the tiers."""
        return [struct.pack(f"{self.page_size}q", *self.pages[page]) for page in pages]

    def _decode(self, span: Span, most: int, drafting: bool) -> list[int]:
        """Find out where the newest token lies and run it with the drafts that may be run."""
        slot = self.slots[span.slot]
        assert slot.request_id == span.request_id, "rows of a request that never began in this slot"
        assert slot.sampled, "nothing was sampled that could be run"
        assert span.first <= slot.end, "the newest token lies before what was thought possible"
        if slot.end >= span.limit:
            return []
        drafts = slot.drafts[: min(span.drafts, span.limit - 1 - slot.end, most)]
        real = replace(span, first=slot.end, count=1 + len(drafts), token_ids=(slot.newest, *drafts))
        values = self._rows(real)
        made = [value % VOCABULARY for value in values]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == made[accepted]:
            accepted += 1
        self.verified += len(drafts)
        self.accepted += accepted
        slot.end = real.first + 1 + accepted
        self._sample(slot, values[accepted], drafting)
        return made[: accepted + 1]

    def _run(self, span: Span, drafting: bool) -> list[int]:
        slot = self.slots[span.slot]
        if span.first == span.floor:  # windows, pairs and history of the slot's last user stay where they were
            slot.request_id, slot.end, slot.sampled, slot.drafts = span.request_id, span.floor, False, []
        assert slot.request_id == span.request_id, "rows of a request that never began in this slot"
        assert slot.end == span.first, "positions are not contiguous"
        assert span.count >= 1
        value = self._rows(span)[-1]
        slot.end = span.end
        if span.sample:
            self._sample(slot, value, drafting)
        return [slot.newest]

    def _sample(self, slot: Slot, value: int, drafting: bool) -> None:
        slot.newest, slot.sampled, slot.drafts = value % VOCABULARY, True, []
        for place in range(self.depth if drafting else 0):
            token = slot.drafts[-1] if slot.drafts else slot.newest
            value = chain(value, token)
            wrong = self.errs and chain(value, place) % self.errs == 0
            slot.drafts.append((value + wrong) % VOCABULARY)

    def _rows(self, span: Span) -> list[int]:
        """Run rows whose ids and positions are known."""
        slot, request, values = self.slots[span.slot], self.requests[span.request_id], []
        assert span.token_ids is not None
        assert len(span.token_ids) == span.count
        for position, token in zip(range(span.first, span.end), span.token_ids, strict=True):
            if position < len(request.token_ids):
                assert token == request.token_ids[position], "not the prompt's token"
            value = chain(self._history(slot, position), token)
            self._check_windows(slot, span, position)
            self._write_global(slot, span, position, value)
            slot.encoder[position % self.ring] = (position, value)
            if position >= span.decoder_from:
                slot.decoder[position % self.ring] = (position, value)
            if position % 2 == 0:
                slot.pairs[position // 2 % self.pair_ring] = (position, value)
            values.append(value)
        return values

    def _history(self, slot: Slot, position: int) -> int:
        """Read global KV of all positions before this one: it must be the chain of some sequence of values."""
        if position == 0:
            return 0
        value = self._global(slot, position - 1)
        assert value != GARBAGE, f"global KV of position {position - 1} was never written"
        return value

    def _global(self, slot: Slot, position: int) -> int:
        return self.pages[slot.pages[position // self.page_size]][position % self.page_size]

    def _check_windows(self, slot: Slot, span: Span, position: int) -> None:
        before = position - self.window + 1
        for seen in range(max(span.floor, before), position):
            assert slot.encoder[seen % self.ring] == (seen, self._global(slot, seen)), "stale encoder window"
        if position >= max(span.decoder_from, span.cut):
            for seen in range(max(span.cut, before), position):
                assert slot.decoder[seen % self.ring] == (seen, self._global(slot, seen)), "stale decoder window"

    def _write_global(self, slot: Slot, span: Span, position: int, value: int) -> None:
        if position < span.write_from:
            assert self._global(slot, position) == value, "the prefix cache served something else"
            return
        if position % 2:
            half = slot.pairs[position // 2 % self.pair_ring]
            assert half == (position - 1, self._global(slot, position - 1)), "the pair's first half is missing"
        self.pages[slot.pages[position // self.page_size]][position % self.page_size] = value

    def _spoil(self, span: Span) -> None:
        slot = self.slots[span.slot]
        slot.newest = GARBAGE
        slot.encoder.clear()
        slot.decoder.clear()
        for position in range(max(span.first, span.write_from), min(span.end, span.limit)):
            self.pages[slot.pages[position // self.page_size]][position % self.page_size] = GARBAGE
