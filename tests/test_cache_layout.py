"""Byte layouts: the released numbers by hand, and rings that survive any rollback."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from released_config import ABSENT, edited, golden, released, small

from deepinfer.cache.layout import CacheLayout, SourceLayout, check_page_size
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError


def layout_of(data: dict[str, object]) -> CacheLayout:
    return CacheLayout.from_config(ModelConfig.from_dict(data, "test"))


RELEASED = layout_of(released())


def test_a_token_of_the_released_shape_costs_890_bytes() -> None:
    """Latent 512/2 + 512/16, index key 128/2 + 128/32; three sources at ratio 2 and one at ratio 1."""
    assert RELEASED.sources == tuple(SourceLayout(layer, ratio, 288, 68) for layer, ratio in
                                     [(2, 2), (8, 2), (14, 2), (20, 1)])  # fmt: skip
    assert RELEASED.bytes_per_token == 2.5 * 356 == 890.0
    assert RELEASED.page_bytes(64) == 890 * 64


def test_a_slot_of_the_released_shape() -> None:
    """Without speculation: a ring of 129 rows of 528 bytes a layer, one FP32 pair of 512 a ratio-2 source, 3 ids."""
    slot = RELEASED.slot_bytes(1)
    assert slot.windows == 40 * 129 * 528
    assert slot.drafts == 3 * 129 * 528
    assert slot.pairs == 3 * 2 * 512 * 4
    assert slot.history == 3 * 8
    assert slot.total == slot.windows + slot.drafts + slot.pairs + slot.history


def test_speculation_makes_rings_longer() -> None:
    slot = RELEASED.slot_bytes(6)
    assert (RELEASED.ring(6), RELEASED.pair_ring(6), RELEASED.history_ring(6)) == (134, 4, 9)
    assert slot.windows == 40 * 134 * 528
    assert slot.pairs == 3 * 4 * 2 * 512 * 4


def test_absent_parts_cost_nothing() -> None:
    bare = layout_of(small())
    assert bare.lookback == 0
    assert bare.slot_bytes(4).history == 0
    no_draft = layout_of(edited(golden(), num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1]))
    assert no_draft.slot_bytes(1).drafts == 0
    ratio_one = edited(
        golden(), compress_ratios=[0, 0, 1, 1, 1, 1, 1, 1, 0, 0], candidate_source_layer_id=-1, rope_scaling=ABSENT
    )
    assert layout_of(ratio_one).pair_layers == ()
    assert layout_of(ratio_one).slot_bytes(3).pairs == 0


@pytest.mark.parametrize("page_size", [-2, 0, 1, 3, 63])
def test_a_page_holds_whole_pairs(page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page size is {page_size}; it takes an even number"):
        check_page_size(page_size)
    with pytest.raises(ConfigError, match="even"):
        RELEASED.page_bytes(page_size)


@settings(max_examples=300, deadline=None)
@given(verify=st.integers(1, 9), data=st.data())
def test_rings_survive_any_rollback(verify: int, data: st.DataObject) -> None:
    """After any run of steps of which all but the first row may be taken back, what the next row needs is there."""
    layout = layout_of(edited(golden(), sliding_window=8))
    window: dict[int, int] = {}
    pairs: dict[int, int] = {}
    history: dict[int, int] = {}
    length = 0
    for _ in range(data.draw(st.integers(1, 25))):
        for position in range(length, length + data.draw(st.integers(1, verify))):
            window[position % layout.ring(verify)] = position
            history[position % layout.history_ring(verify)] = position
            if position % 2 == 0:
                pairs[position // 2 % layout.pair_ring(verify)] = position
            written = position
        length = data.draw(st.integers(length + 1, written + 1))
        for needed in range(max(0, length - layout.window + 1), length):
            assert window[needed % layout.ring(verify)] == needed
        for needed in range(max(0, length - layout.lookback), length):
            assert history[needed % layout.history_ring(verify)] == needed
        if length % 2:
            assert pairs[(length - 1) // 2 % layout.pair_ring(verify)] == length - 1
