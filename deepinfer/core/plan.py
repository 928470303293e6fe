"""What one step of the model is to do, and with which pages.

The scheduler writes plans and the runner carries them out, in their order; the owner of the pages admits requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one request in one step; positions count from 0 at the request's first token.

    slot: the request's row in windows, pairs, histories and the page table.
    first, count: the rows' positions are first .. first + count - 1.
    token_ids: the rows' ids; None: rows of the newest token, which the device knows, and of the `count - 1` first
        drafts behind it. A step in flight may settle how many tokens there are, so `first` is then the least position
        that the newest token can have and `count` the most rows; the runner knows better when it comes to the plan.
    write_from: a compressed entry is written iff its last token's position is >= write_from.
    floor: encoder-half windows see nothing before this position. A span with `first == floor` begins the request in
        its slot: what the slot held before belongs to someone else.
    cut: decoder-half windows of rows at or after `cut` see nothing before it.
    decoder_from: rows at positions >= this run the decoder half too; it may lie beyond the span: then none do.
    sample: the last row's logits give the request's next token, with drafts every row's.
    limit: rows at positions >= this are not run; with `token_ids` None the plan cannot know where they end.
    """

    request_id: int
    slot: int
    first: int
    count: int
    token_ids: tuple[int, ...] | None
    write_from: int
    floor: int
    cut: int
    decoder_from: int
    sample: bool
    limit: int = NO_LIMIT

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.first + self.count

    @property
    def drafts(self) -> int:
        """Most drafts to be verified."""
        return self.count - 1 if self.token_ids is None else 0


@dataclass(frozen=True, slots=True)
class PageLoad:
    """A page to be filled before the step from `data`, which a cache tier handed out and alone understands."""

    page: int
    data: object


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image in a prompt: its tokens are at positions start .. end - 1.

    digest: name of its content. patches, cells: how many it has before and after the vision tower.
    """

    start: int
    end: int
    digest: str
    patches: int
    cells: int


@dataclass(frozen=True, slots=True)
class Encode:
    """A part of an image's way through the vision tower.

    digest: which image; `request_id` has it as number `place`, and suffers if it cannot be encoded.
    first, end: the tower's blocks first .. end - 1 are run. 0 begins an image; `last`: it is through after this part.
    """

    digest: str
    request_id: int
    place: int
    first: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: decode spans first, then prefill; no request has two spans.

    number: counts up from 0 without gaps; plans are carried out in this order.
    pages: slot -> the request's whole list of pages, only where it changed since the last plan.
    loads: pages to be filled from a tier before the step.
    dropped, encodes: images whose embeddings may go; then what is to be encoded, before the rows that need it.
    verified: most drafts verified by all spans together; None: as many as their rows allow.
    drafting: whether new blocks are drafted after the sampled tokens.
    """

    number: int
    spans: tuple[Span, ...]
    pages: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    loads: tuple[PageLoad, ...] = ()
    dropped: tuple[str, ...] = ()
    encodes: tuple[Encode, ...] = ()
    verified: int | None = None
    drafting: bool = False

    @property
    def rows(self) -> int:
        """Most rows of the step."""
        most = sum(span.drafts for span in self.spans)
        unused = 0 if self.verified is None else max(0, most - self.verified)
        return sum(span.count for span in self.spans) - unused


@dataclass(frozen=True, slots=True)
class Admitted:
    """The pages of a request at its start.

    pages: pages for all tokens asked for, in order; the request's steps never write the first `hit_tokens / page_size`.
    hit_tokens: tokens whose global KV those pages hold already (a multiple of the page size), 0 for none.
    miss: why the hit is no longer: "evicted", "first seen", "differs at token n", "too short", "mode forbids".
    loads: hit pages whose bytes come from a lower tier: they must be filled before the step that first reads them.
    """

    pages: tuple[int, ...]
    hit_tokens: int
    miss: str | None
    loads: tuple[PageLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """How a step deals with drafts.

    depth: most drafts verified behind one newest token; 0: none.
    total: most of all requests together; None: no limit.
    drafting: whether blocks are drafted for the step after it.
    speculative: whether there may be drafts at all in this engine; the device then knows the newest tokens.
    """

    depth: int = 0
    total: int | None = None
    drafting: bool = False
    speculative: bool = False


NO_DRAFTS = Verification()
