"""The model over caches gives the reference's values, whatever the chunks, the neighbours and the pages.

Cache formats do not round here (see `make_smooth`; `test_model_golden` has the real ones). Caches begin as garbage.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_rig import Player, error, make_smooth, rig_of, text
from random_models import VARIANTS

from deepinfer.model.model import InferenceModel

LIMIT = 2e-5
MODES = ["off", "mask", "compact"]
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    make_smooth(monkeypatch)


@each_variant
@each_mode
@pytest.mark.parametrize("chunk", [7, 64])
def test_a_request_in_chunks(variant: str, mode: str, chunk: int) -> None:
    rig = rig_of(variant)
    player = Player(rig.model, page_size=4)
    number = player.add(text(rig, 45), mode, start=21)
    assert error(rig, player.run(number, chunk)) < LIMIT


@each_variant
def test_a_request_token_by_token(variant: str) -> None:
    rig = rig_of(variant)
    player = Player(rig.model, page_size=4)
    number = player.add(text(rig, 24), "compact", start=5)
    assert error(rig, player.run(number, 1)) < LIMIT


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("length", [1, 2, 3, 6, 7, 8, 33])
@pytest.mark.parametrize("start", [0, 1, 2, 5, 32])
def test_lengths_and_starts(mode: str, length: int, start: int) -> None:
    """Shorter and longer than the window, odd and even, the whole prompt replayed or only its last token."""
    rig = rig_of("all parts")
    for chunk in (3, length):
        player = Player(rig.model)
        number = player.add(text(rig, length), mode, min(start, length - 1))
        assert error(rig, player.run(number, chunk)) < LIMIT


@pytest.mark.parametrize("page_size", [2, 4, 16, 64])
@pytest.mark.parametrize("verify_rows", [1, 2, 6])
def test_page_sizes_and_longer_rings(page_size: int, verify_rows: int) -> None:
    rig = rig_of("all parts")
    player = Player(rig.model, page_size=page_size, verify_rows=verify_rows)
    numbers = [player.add(text(rig, length), "compact", length // 2) for length in (40, 33)]
    for _ in range(3):
        player.step(dict.fromkeys(numbers, 11))
    player.step({numbers[0]: 7})
    assert all(error(rig, player.requests[number]) < LIMIT for number in numbers)


@each_variant
def test_random_steps_of_many_requests(variant: str) -> None:
    """Decode rows, chunks and whole prompts in one step; requests end and others take their slots and pages."""
    rig, chance = rig_of(variant), random.Random(variant)
    player = Player(rig.model, slots=5, page_size=8, pages=48)
    waiting = [(length, chance.choice(MODES)) for length in (50, 3, 41, 1, 22, 37, 64, 2, 15, 30)]
    compared = 0
    while waiting or player.requests:
        while waiting and player.free_slots:
            length, mode = waiting.pop()
            player.add(text(rig, length, seed=100 + length), mode, max(0, length - chance.randint(1, 20)))
        left = {number: len(playing.ids) - playing.done for number, playing in player.requests.items()}
        chosen = [number for number in left if chance.random() < 0.8] or list(left)
        player.step({number: min(left[number], chance.choice([1, 1, 1, 2, 5, 9, 30])) for number in chosen})
        for number in [number for number, playing in player.requests.items() if playing.done == len(playing.ids)]:
            assert error(rig, player.requests[number]) < LIMIT
            player.end(number)
            compared += 1
    assert compared == 10


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_chunking(data: st.DataObject) -> None:
    rig = rig_of("two ratio-2 sources")
    length = data.draw(st.integers(1, 40))
    mode, start = data.draw(st.sampled_from(MODES)), data.draw(st.integers(0, length - 1))
    player = Player(rig.model, page_size=data.draw(st.sampled_from([2, 4, 6, 8])))
    number = player.add(text(rig, length), mode, start)
    while (left := length - player.requests[number].done) > 0:
        player.step({number: data.draw(st.integers(1, left))})
    assert error(rig, player.requests[number]) < LIMIT


def test_a_request_computed_again_in_another_slot() -> None:
    """As after preemption: the same replay start, prompt and generated tokens in one go, other pages."""
    rig = rig_of("all parts")
    player = Player(rig.model)
    first = player.add(text(rig, 40), "compact", 12)
    for count in (20, 1, 1, 1):
        player.step({first: count})
    begun = player.end(first)
    player.add(text(rig, 20, seed=3), "compact", 0)
    again = player.add(text(rig, 40), "compact", 12)
    player.step({again: 23})
    assert player.requests[again].slot != begun.slot or player.requests[again].pages != begun.pages
    for position, logits in begun.logits.items():
        assert torch.allclose(player.requests[again].logits[position], logits, atol=1e-4)
    assert error(rig, player.run(again, 5)) < LIMIT


def test_chunks_before_the_replay_start_run_no_decoder_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, ran = rig_of("all parts"), []
    layer = InferenceModel._layer

    def counted(model: InferenceModel, number: int, rows: object, *rest: object) -> object:
        ran.append((number, len(rows.x)))
        return layer(model, number, rows, *rest)

    monkeypatch.setattr(InferenceModel, "_layer", counted)
    player, start = Player(rig.model), rig.model.config.decoder_start
    number = player.add(text(rig, 30), "compact", 20)
    output = player.step({number: 12})
    assert [layer for layer, _ in ran] == list(range(start))
    assert (len(output.logits), len(output.features)) == (0, 0)
    ran.clear()
    player.step({number: 12})
    assert ran == [(layer, 12 if layer < start else 4) for layer in range(rig.model.config.num_hidden_layers)]
    player.step({number: 6})
    assert error(rig, player.requests[number]) < LIMIT


def test_a_request_of_nan_harms_no_neighbour() -> None:
    rig = rig_of("all parts")
    player = Player(rig.model, pages=32)
    healthy, ill = (player.add(text(rig, 40, seed), "compact", 20) for seed in (1, 2))
    player.step({healthy: 9, ill: 9})
    slot, pages = player.requests[ill].slot, player.requests[ill].pages
    player.caches.windows[:, slot] = 255
    for cache in (*player.caches.latents, *player.caches.index_keys):
        cache[pages] = 255
    output = player.step({healthy: 16, ill: 16})
    assert output.logits.isnan().any()
    for _ in range(15):
        player.step({ill: 1, healthy: 1})
    assert error(rig, player.requests[healthy]) < LIMIT
    player.end(ill)
    after = player.add(text(rig, 25, seed=5), "off")
    assert error(rig, player.run(after, 4)) < LIMIT
