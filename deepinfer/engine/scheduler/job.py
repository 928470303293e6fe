"""What the scheduler knows of one request."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum, auto

from deepinfer.core.plan import Admitted, ImageSpan
from deepinfer.engine.sequence import Sequence

Rank = tuple[int, int]
"""Place in the order of service, lowest first; unique, and the same for the life of a request."""


class Phase(Enum):
    """Where a request is on its way."""

    FOLLOWING = auto()  # waits until another request has run the prompt that they share
    WAITING = auto()  # in the queue, without slot and pages
    RUNNING = auto()  # has a slot and pages, and gets rows
    LEAVING = auto()  # gets no more rows, and waits again once no step in flight uses its slot and pages
    ENDED = auto()  # finished, cancelled or failed; may keep slot and pages for a step in flight


@dataclass(slots=True, eq=False)
class Job:
    """One request's state; callers read it, only the scheduler changes it.

    keys: content of the prompt's tokens, by which pages are shared.
    end: the position that is never run, because the request has all its tokens before.
    slot, pages, room: what it holds; `room` counts the tokens that the pages have place for.
    next: first position that no plan holds yet; with drafts in flight the least that it can turn out to be.
    slack: drafts in flight; so many positions `next` can turn out to be further on.
    floor, write_from, decoder_from: as in `Span`.
    published: tokens whose pages others may share. loaded: some of them come from a tier, and have yet to arrive.
    pending: steps in flight that will sample for it; the ids are on the device only.
    in_flight: steps in flight that hold rows of it.
    chances: survival of the drafts of its two newest blocks that the host has seen, the newest last.
    void: what the steps in flight compute for it cannot be used, because a step before them failed.
    hit_tokens, miss: tokens of its last start that came from the prefix cache, and why there were no more.
    images: where pictures stand in its prompt. seen: how many of them it has asked for since its last start.
    preemptions: how often it lost its pages and began again.
    error: why it failed.
    """

    request_id: int
    sequence: Sequence
    keys: Seq[Hashable]
    rank: Rank
    end: int
    decoder_from: int
    phase: Phase = Phase.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    room: int = 0
    next: int = 0
    slack: int = 0
    floor: int = 0
    write_from: int = 0
    published: int = 0
    loaded: bool = False
    pending: int = 0
    in_flight: int = 0
    chances: tuple[Seq[float], ...] = ()
    void: bool = False
    hit_tokens: int = 0
    miss: str | None = None
    images: tuple[ImageSpan, ...] = ()
    seen: int = 0
    preemptions: int = 0
    error: Exception | None = None

    def start(self, slot: int, admitted: Admitted, page_size: int, window: int) -> None:
        """Take the slot and the pages, and go to the first position to run.

        After a hit the windows are rebuilt: rows go back one window from the hit's end, or from the decoder's first
        position if that lies before it.
        """
        hit = admitted.hit_tokens
        first = max(0, min(hit, self.sequence.replay_start) - window)
        self.phase, self.slot = Phase.RUNNING, slot
        self.pages, self.room = list(admitted.pages), len(admitted.pages) * page_size
        self.next = self.floor = first
        self.seen = 0
        self.write_from = self.published = self.hit_tokens = hit
        self.miss, self.loaded = admitted.miss, bool(admitted.loads)

    def take_pages(self, pages: Seq[int], page_size: int) -> None:
        """Hold more pages, behind those it has."""
        self.pages.extend(pages)
        self.room += len(pages) * page_size

    def clear(self) -> None:
        """Forget what a slot and pages held, keeping every token that was generated."""
        self.slot, self.pages, self.room = None, [], 0
        self.next = self.slack = self.pending = 0
        self.void, self.chances = False, ()

    @property
    def known_chances(self) -> Seq[float] | None:
        """Survival in the newest block that steps before the next one have verified; None if there is none.

        The block that the next step verifies was drafted by the last step with a sampled row: one in flight, or else
        the one whose block was seen last.
        """
        verified = self.chances if self.pending else self.chances[:-1]
        return verified[-1] if verified else None

    def token_ids(self, first: int, end: int) -> tuple[int, ...]:
        """Ids of the known tokens at positions first .. end - 1."""
        prompt = self.sequence.request.token_ids
        generated = self.sequence.generated[max(0, first - len(prompt)) : max(0, end - len(prompt))]
        return (*prompt[first:end], *generated)

    def page_keys(self, first: int, end: int) -> Seq[Hashable]:
        """Content of the known tokens at positions first .. end - 1."""
        known = len(self.keys)
        generated = self.sequence.generated[max(0, first - known) : max(0, end - known)]
        return (*self.keys[first:end], *generated)
