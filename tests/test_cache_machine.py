"""Requests come, grow, share and go at random: no page is lost, shared wrongly, or read before it was written."""

import random
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import pytest
from cache_world import PAGES, SIZE, World, damage
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.cache.statistics import CacheStatistics

STEPS = 15_000


def random_step(world: World, chance: random.Random) -> None:
    """One event. Texts begin alike, so that prefixes are shared; trouble is rare, so that there is much to lose."""
    number = chance.choice(sorted(world.running)) if world.running else None
    kind = chance.choices(["admit", "write", "generate", "release", "damage", "restart"], [30, 35, 20, 15, 2, 0.3])[0]
    if kind == "admit":
        text = chance.choice(["aaaaaa", "aabbaa", "ababab"])[: chance.randint(0, 6)]
        text += "".join(chance.choices("ab", k=chance.randint(1, 5)))
        world.admit(text, chance.choice([0, 0, 1, 3]), chance.random() < 0.9, chance.random() < 0.1)
    elif kind == "damage" and world.files():
        damage(
            chance.choice(world.files()),
            chance.choice(["cut", "flip", "remove"]),
            chance.choice([-1, chance.randrange(400)]),
        )
    elif kind == "restart":
        world.restart(gracefully=chance.random() < 0.7)
    elif number is not None:
        request = world.running[number]
        if kind == "write":
            world.write(number, chance.randint(request.written, len(request.tokens) // SIZE))
        elif kind == "generate" and len(request.tokens) < 12:
            world.generate(number, "".join(chance.choices("ab", k=chance.randint(1, 4))))
        elif kind == "release":
            world.release(number)


@pytest.mark.filterwarnings("ignore:cached page:RuntimeWarning")
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_random_events(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    world = World(tmp_path)
    seen: Counter[str] = Counter()
    for _ in range(STEPS):
        before = world.kv.statistics
        random_step(world, chance)
        world.check()
        if world.kv.statistics is not before:  # restarted
            seen.update(_counts(before))
    seen.update(_counts(world.kv.statistics))
    world.close()
    # What should have happened many times did: else the test shows nothing.
    for event in ("admitted", "evicted", "stored", "loaded from host", "loaded from disk"):
        assert seen[event] > 50, (event, seen)
    assert seen["hit tokens"] > 500
    assert {"evicted miss", "first seen miss", "differs miss", "too short miss", "mode forbids miss"} <= set(seen)


def _counts(statistics: CacheStatistics) -> Counter[str]:
    counts = Counter({f"loaded from {tier}": count for tier, count in statistics.loaded_pages.items()})
    counts.update({f"{reason} miss": count for reason, count in statistics.misses.items()})
    counts.update(admitted=statistics.admissions, evicted=statistics.evicted_pages)
    counts.update({"stored": statistics.stored_pages, "hit tokens": statistics.hit_tokens})
    return counts


class KVMachine(RuleBasedStateMachine):
    """The same world, driven by Hypothesis, which finds a shortest way to a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = World(Path(self.folder.name))

    def some_request(self, data: st.DataObject) -> int:
        number: int = data.draw(st.sampled_from(sorted(self.world.running)))
        return number

    @rule(tokens=st.text("ab", min_size=1, max_size=9), spare=st.integers(0, 2), may_hit=st.booleans())
    def admit(self, tokens: str, spare: int, may_hit: bool) -> None:
        self.world.admit(tokens, spare, may_hit)

    @rule(tokens=st.text("ab", min_size=1, max_size=9))
    def admit_and_fail(self, tokens: str) -> None:
        self.world.admit(tokens, fails=True)

    @rule(tokens=st.text("ab", min_size=1, max_size=2 * PAGES))
    def serve(self, tokens: str) -> None:
        self.world.admit(tokens)
        if self.world.number in self.world.running:
            self.world.write(self.world.number, len(tokens) // SIZE)
            self.world.release(self.world.number)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), more=st.text("ab", max_size=5))
    def generate(self, data: st.DataObject, more: str) -> None:
        self.world.generate(self.some_request(data), more)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        number = self.some_request(data)
        request = self.world.running[number]
        self.world.write(number, data.draw(st.integers(request.written, len(request.tokens) // SIZE)))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.world.release(self.some_request(data))

    @precondition(lambda self: self.world.files())
    @rule(data=st.data(), kind=st.sampled_from(["cut", "flip", "remove"]), at=st.integers(0, 200))
    def damage(self, data: st.DataObject, kind: str, at: int) -> None:
        damage(data.draw(st.sampled_from(self.world.files())), kind, at)

    @rule(gracefully=st.booleans())
    def restart(self, gracefully: bool) -> None:
        self.world.restart(gracefully)

    @invariant()
    def whole(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.close()
        self.folder.cleanup()


class TestKVMachine(KVMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

    def runTest(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # damaged files are skipped with one
            super().runTest()
