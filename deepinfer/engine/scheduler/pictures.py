"""Which images a step sends through the vision tower, and which ones stay encoded for others that show the same."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from deepinfer.core.plan import Encode, ImageSpan
from deepinfer.core.request import Request
from deepinfer.engine.scheduler.job import Job


@dataclass(frozen=True)
class VisionLimits:
    """Sizes of the tower, and settings.

    blocks: the tower's; an image may go through some of them in one step and through the others in later ones.
    step_patches: patches that one step may send through all blocks, so that no row waits for more.
    cache_bytes: memory for embeddings. Images that running requests come to next stay, and nothing else is begun while
        they fill it; a single image may exceed it.
    cell_bytes, patch_bytes: of the embedding of an image token, and of a patch between two blocks.
    """

    blocks: int = 1
    step_patches: int = 4096
    cache_bytes: int = 0
    cell_bytes: int = 1
    patch_bytes: int = 1


@dataclass
class PictureStatistics:
    """Images encoded anew, their patches, images of requests that were there already, images dropped for others."""

    encoded: int = 0
    patches: int = 0
    reused: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Entry:
    """An image that is encoded as far as `done` blocks, once the steps planned so far have run."""

    bytes: int
    done: int = 0


def no_images(_: Request) -> tuple[ImageSpan, ...]:
    """Return the images of a request that has none."""
    return ()


class Pictures:
    """Decides what is encoded and kept; the runner does it, in the same order, because plans say so.

    Images are known by their content: whoever shows one that is there, or under way, shares it. Rows of an image run in
    the step that completes it, at the earliest.
    """

    def __init__(
        self, limits: VisionLimits | None = None, spans: Callable[[Request], tuple[ImageSpan, ...]] = no_images
    ) -> None:
        """`spans` tells where the images of a request stand in its prompt."""
        self.spans = spans
        self.statistics = PictureStatistics()
        self._limits = limits or VisionLimits()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._used = 0
        self._wanted: set[str] = set()
        self._left = 0
        self._encodes: list[Encode] = []
        self._dropped: list[str] = []

    def start_plan(self, jobs: Iterable[Job]) -> None:
        """Begin a step; `jobs` have prompt left to run, and the images that they come to next must stay."""
        self._left = self._limits.step_patches * self._limits.blocks
        self._wanted = {digest for job in jobs for digest in self._next_of(job)}
        self._make_room(0)

    def reach(self, job: Job, end: int) -> int:
        """Return how far the job's rows can run in this step, at most to `end`: before an image that is not encoded."""
        for place, span in enumerate(job.images):
            if job.next < span.end and span.start < end and not self._encode(job, place):
                return max(job.next, span.start)
        return end

    def look_ahead(self, jobs: Iterable[Job]) -> None:
        """Use what is left of the budget for images that the jobs' later rows need."""
        for job in jobs:
            for place, span in enumerate(job.images):
                if job.next < span.end and not self._encode(job, place):
                    return

    @property
    def busy(self) -> bool:
        """Whether the step encodes anything."""
        return bool(self._encodes)

    def planned(self) -> tuple[tuple[str, ...], tuple[Encode, ...]]:
        """What the step drops, and then encodes."""
        dropped, self._dropped = tuple(self._dropped), []
        encodes, self._encodes = tuple(self._encodes), []
        return dropped, encodes

    def forget(self, digests: Iterable[str]) -> None:
        """Take images for not encoded: a step that was to do it failed, or one of them cannot be."""
        for digest in digests:
            if digest in self._entries:
                self._drop(digest)

    def _next_of(self, job: Job) -> Iterator[str]:
        """The images before the first that is missing: what is behind that one must not keep it from coming."""
        for span in job.images:
            if job.next < span.end:
                if span.digest not in self._entries:
                    return
                yield span.digest

    def _encode(self, job: Job, place: int) -> bool:
        """Take an image as far as the budget goes; whether it is through with this step."""
        span = job.images[place]
        entry = self._entries.get(span.digest)
        blocks = self._affordable(span.patches, self._limits.blocks - (entry.done if entry else 0))
        if entry is None:
            if not blocks or not self._make_room(self._bytes(span, whole=False)):
                return False
            entry = self._enter(span)
            self.statistics.encoded += 1
            self.statistics.patches += span.patches
        elif place >= job.seen:
            self.statistics.reused += 1
        job.seen = max(job.seen, place + 1)
        self._entries.move_to_end(span.digest)
        self._wanted.add(span.digest)
        if blocks:
            self._advance(entry, span, blocks, job.request_id, place)
        return entry.done == self._limits.blocks

    def _affordable(self, patches: int, blocks: int) -> int:
        """Of so many blocks, those that the budget has room for; at least one, if nothing else is encoded."""
        fitting = max(0, self._left) // patches
        return min(blocks, fitting if fitting or self._encodes else 1)

    def _enter(self, span: ImageSpan) -> _Entry:
        entry = _Entry(self._bytes(span, whole=False))
        self._entries[span.digest] = entry
        self._used += entry.bytes
        return entry

    def _advance(self, entry: _Entry, span: ImageSpan, blocks: int, request_id: int, place: int) -> None:
        first, entry.done = entry.done, entry.done + blocks
        whole = entry.done == self._limits.blocks
        self._encodes.append(Encode(span.digest, request_id, place, first, entry.done, whole))
        self._left -= blocks * span.patches
        if whole:
            self._used -= entry.bytes
            entry.bytes = self._bytes(span, whole=True)
            self._used += entry.bytes

    def _bytes(self, span: ImageSpan, whole: bool) -> int:
        """Of an image on its way and at its end; on its way it must have room for its end."""
        embedding = span.cells * self._limits.cell_bytes
        return embedding if whole else max(embedding, span.patches * self._limits.patch_bytes)

    def _make_room(self, size: int) -> bool:
        """Drop images that nobody is about to read, as far as it takes; whether `size` bytes may be added."""
        if self._used + size <= self._limits.cache_bytes:
            return True
        for digest in list(self._entries):
            if self._used + size <= self._limits.cache_bytes:
                return True
            if digest not in self._wanted:
                self._drop(digest)
                self.statistics.dropped += 1
        return self._used + size <= self._limits.cache_bytes or not self._entries

    def _drop(self, digest: str) -> None:
        self._used -= self._entries.pop(digest).bytes
        self._dropped.append(digest)
