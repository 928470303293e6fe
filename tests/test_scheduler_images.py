"""Images in the schedule: encoded before their rows run, within a budget, once for all who show them, and let go."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from scheduler_fakes import FakePages, commit, run, shape
from scheduler_harness import CONTEXT, STOP, request

from deepinfer.core.plan import Encode, ImageSpan, Plan
from deepinfer.core.request import Request
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.engine.scheduler import EndRules, Pictures, Scheduler, SchedulerLimits, VisionLimits

BLOCKS = 4


def image(start: int, digest: str, patches: int = 4, cells: int = 2) -> ImageSpan:
    return ImageSpan(start, start + cells + 2, digest, patches, cells)


@dataclass
class World:
    """A scheduler for requests with images, and a vision tower that checks what plans ask of it."""

    step_patches: int = 4
    cache_bytes: int = 1 << 20
    slots: int = 4
    budget: int = 32
    chunk: int | None = None
    pages: int = 64
    done: dict[str, int] = field(default_factory=dict)
    spans: dict[int, tuple[ImageSpan, ...]] = field(default_factory=dict)
    encoded: list[Encode] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = VisionLimits(BLOCKS, self.step_patches, self.cache_bytes, cell_bytes=3, patch_bytes=2)
        self.pictures = Pictures(limits, lambda request: self.new)
        self.kv = FakePages(self.pages)
        scheduling = SchedulerLimits(self.slots, self.budget, self.chunk, 10, True)
        ends = EndRules(STOP, CONTEXT)
        self.scheduler = Scheduler(scheduling, ReplayPolicy("compact", 6), 4, self.kv, ends, pictures=self.pictures)
        self.new: tuple[ImageSpan, ...] = ()

    def add(self, length: int, *images: ImageSpan, tokens: int = 2) -> int:
        self.new = images
        number = self.scheduler.add(self.request(length, tokens))
        self.spans[number] = images
        return number

    def request(self, length: int, tokens: int) -> Request:
        return request([5] * length, tokens)

    def execute(self, plan: Plan) -> None:
        """Do as the runner does, and complain as it would."""
        for digest in plan.dropped:
            self.done.pop(digest, None)
        for encode in plan.encodes:
            assert self.spans[encode.request_id][encode.place].digest == encode.digest
            assert encode.first < encode.end <= BLOCKS
            assert self.done.get(encode.digest, 0) == (
                encode.first if encode.first else self.done.get(encode.digest, 0)
            )
            assert encode.last == (encode.end == BLOCKS)
            self.done[encode.digest] = encode.end
        self.encoded += plan.encodes
        work = sum((one.end - one.first) * self.patches(one) for one in plan.encodes)
        assert work <= self.step_patches * BLOCKS or len(plan.encodes) == 1
        for span in plan.spans:
            for shown in self.spans[span.request_id]:
                if span.first < shown.end and shown.start < span.end:
                    assert self.done.get(shown.digest) == BLOCKS, "rows of an image that is not encoded"

    def patches(self, encode: Encode) -> int:
        return self.spans[encode.request_id][encode.place].patches

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.execute(plan)
            commit(self.scheduler, plan)
        return plan

    def run_all(self) -> list[Plan]:
        plans = []
        while (plan := self.step()) is not None:
            plans.append(plan)
        return plans


def blocks(plan: Plan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(encode.digest, encode.first, encode.end) for encode in plan.encodes]


def test_an_image_within_the_budget_runs_with_its_rows() -> None:
    world = World()
    world.add(10, image(3, "a"))
    plan = world.step()
    assert blocks(plan) == [("a", 0, 4)]
    assert shape(plan) == [(0, 0, 10)]


def test_a_large_image_takes_several_steps_while_others_go_on() -> None:
    """The text before it runs at once, decoding goes on beside it, no step encodes more than the budget."""
    world = World()
    text = world.add(5, tokens=8)
    world.step()
    seen = world.add(12, image(3, "a", patches=8))
    plans = [world.step() for _ in range(3)]
    assert [blocks(plan) for plan in plans] == [[("a", 0, 2)], [("a", 2, 4)], []]
    assert [shape(plan) for plan in plans] == [
        [(text, 5, 1), (seen, 0, 3)], [(text, 6, 1), (seen, 3, 9)], [(text, 7, 1), (seen, 12, 1)],
    ]  # fmt: skip


def test_an_image_larger_than_the_budget_goes_block_by_block() -> None:
    world = World()
    world.add(8, image(0, "a", patches=1000))
    plans = [world.step() for _ in range(4)]
    assert [blocks(plan) for plan in plans] == [[("a", n, n + 1)] for n in range(4)]
    assert [shape(plan) for plan in plans] == [[], [], [], [(0, 0, 8)]]


def test_chunks_cut_an_image_which_is_encoded_once() -> None:
    world = World(chunk=3)
    world.add(12, image(1, "a", cells=7))
    plans = world.run_all()
    assert [span.count for plan in plans for span in plan.spans] == [3, 3, 3, 3, 1]
    assert len(world.encoded) == 1


def test_the_same_content_is_encoded_once() -> None:
    world = World()
    world.add(10, image(1, "a"), image(5, "a"))
    world.add(10, image(2, "a"))
    world.run_all()
    world.add(20, image(9, "a"))
    world.add(20, image(9, "b"))
    world.run_all()
    assert [encode.digest for encode in world.encoded] == ["a", "b"]
    statistics = world.pictures.statistics
    assert (statistics.encoded, statistics.patches, statistics.reused, statistics.dropped) == (2, 8, 3, 0)


def test_budget_that_is_left_goes_to_images_further_on() -> None:
    world = World(step_patches=12, chunk=4)
    world.add(30, image(2, "a"), image(8, "b"), image(20, "c"), image(25, "d"))
    assert blocks(world.step()) == [("a", 0, 4), ("b", 0, 4), ("c", 0, 4)]
    assert blocks(world.step()) == [("d", 0, 4)]


def test_what_a_prefix_hit_covers_is_not_encoded() -> None:
    world = World()
    world.kv.hits[0] = 16
    world.add(24, image(2, "before"), image(15, "across"), image(20, "after"))
    plan = world.step()
    assert plan is not None
    assert plan.spans[0].first == 12  # one window before the hit's end
    world.run_all()
    assert {encode.digest for encode in world.encoded} == {"across", "after"}


def test_the_least_recently_used_goes_first() -> None:
    world = World(cache_bytes=2 * 8)  # two images of 4 patches on their way
    for digest in ("a", "b", "a", "c"):
        world.add(8, image(1, digest))
        world.run_all()
    assert set(world.done) <= {"a", "c", "b"}
    assert "a" in world.done
    assert "b" not in world.done
    world.add(8, image(1, "a"))
    world.run_all()
    assert [encode.digest for encode in world.encoded] == ["a", "b", "c"]
    assert world.pictures.statistics.dropped == 1


def test_no_memory_at_all_means_one_image_at_a_time() -> None:
    world = World(cache_bytes=0, step_patches=100)
    for number in range(3):
        world.add(20, image(1, f"a{number}"), image(8, f"b{number}"))
    for plan in world.run_all():
        assert len(plan.encodes) <= 1
        assert len(world.done) <= 1
    assert len(world.encoded) == 6


def test_a_step_that_failed_is_not_relied_on() -> None:
    world = World()
    world.add(10, image(3, "a"))
    plan = world.scheduler.plan()
    assert plan is not None
    lost = world.scheduler.fail(plan.number, RuntimeError("broken"))
    assert [job.request_id for job in lost] == [0]
    world.add(10, image(3, "a"))
    assert blocks(world.step()) == [("a", 0, 4)]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_image_that_cannot_be_encoded_ends_its_request_alone(ahead: bool) -> None:
    world = World(step_patches=8)
    bad, good = world.add(10, image(3, "bad")), world.add(10, image(3, "good"), tokens=4)
    plan = world.scheduler.plan()
    assert plan is not None
    following = world.scheduler.plan() if ahead else None
    tokens = {span.request_id: [7] for span in plan.spans}
    taken = world.scheduler.commit(plan.number, tokens, {bad: ValueError("no picture")})
    assert [(job.request_id, job.sequence.finish_reason) for job in taken] == [(bad, "error"), (good, None)]
    assert str(taken[0].error) == "no picture"
    if following is not None:
        assert [job.request_id for job in commit(world.scheduler, following)] == [good]
    again = world.add(10, image(3, "bad"))
    plan, _ = run(world.scheduler)
    assert "bad" in plan.dropped
    assert blocks(plan) == [("bad", 0, 4)]
    while world.scheduler.has_work():
        run(world.scheduler)
    assert world.scheduler.statistics.finished == 2
    assert world.scheduler.statistics.failed == 1
    assert again == 2
    assert not world.kv.held


def random_world(source: random.Random) -> World:
    return World(
        step_patches=source.choice([1, 3, 8, 30]),
        cache_bytes=source.choice([0, 10, 40, 1000]),
        slots=source.choice([1, 2, 4]),
        budget=source.choice([4, 9, 32]),
        chunk=source.choice([None, 1, 5]),
        pages=source.choice([14, 20, 64]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_course_of_events(seed: int) -> None:
    """Shared images, little memory, preemption, steps in flight, failures, cancelled requests: all come to an end."""
    source = random.Random(seed)
    world = random_world(source)
    flying: deque[Plan] = deque()
    left, ended = 25, 0
    while left or world.scheduler.has_work():
        if left and source.random() < 0.5:
            left -= 1
            at, images = source.randrange(4), []
            for _ in range(source.choice([0, 1, 1, 3])):
                images.append(image(at, source.choice("abcdef"), source.choice([1, 4, 13]), source.choice([1, 3])))
                at = images[-1].end + source.randrange(5)
            # Equal content has equal sizes.
            images = [
                image(one.start, f"{one.digest}{one.patches}.{one.cells}", one.patches, one.cells) for one in images
            ]
            world.add(min(at + 1 + source.randrange(6), 50), *images, tokens=source.choice([1, 3, 9]))
        if source.random() < 0.05 and world.scheduler._jobs:
            world.scheduler.cancel(source.choice(list(world.scheduler._jobs)))
        plan = world.scheduler.plan() if len(flying) < 2 else None
        if plan is not None:
            world.execute(plan)
            flying.append(plan)
        if flying and (len(flying) == 2 or plan is None or source.random() < 0.3):
            landing = flying.popleft()
            tokens = {span.request_id: [7] for span in landing.spans if span.sample}
            if source.random() < 0.05:
                world.scheduler.fail(landing.number, RuntimeError("broken"))
            else:
                guilty = {one.request_id for one in landing.encodes if source.random() < 0.05}
                world.scheduler.commit(landing.number, tokens, {one: ValueError("no picture") for one in guilty})
    assert world.scheduler.statistics.ended == 25
    assert not world.kv.held
    entries = world.pictures._entries
    assert world.pictures._used == sum(entry.bytes for entry in entries.values())
    assert ended == 0
