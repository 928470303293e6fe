"""From spans to rows: every property row by row, against what the spans say."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.core.batch import Half
from deepinfer.core.plan import Span
from deepinfer.model.batching import Arrangement, arrange

CPU = torch.device("cpu")


@st.composite
def span_lists(draw: st.DrawFn) -> list[Span]:
    """Spans of different requests; some begin behind a prefix, some stop before the decoder half."""
    spans = []
    for number in range(draw(st.integers(1, 7))):
        first, count = draw(st.integers(0, 40)), draw(st.integers(1, 12))
        floor = draw(st.integers(0, first))
        cut = draw(st.integers(floor, first + count + 3))
        decoder_from = draw(st.sampled_from([0, cut]))
        sample = draw(st.booleans()) and decoder_from < first + count
        ids = tuple(range(count))
        write_from = draw(st.integers(0, first + count))
        spans.append(Span(number, 9 - number, first, count, ids, write_from, floor, cut, decoder_from, sample))
    return spans


@dataclass(frozen=True)
class Row:
    """One row of a half, spelled out."""

    span: Span
    position: int

    @property
    def lowest_decoded(self) -> int:
        run_from = max(self.span.floor, self.span.decoder_from)
        return max(run_from, self.span.cut) if self.position >= self.span.cut else run_from


def rows_of(half: Half, spans: list[Span]) -> list[Row]:
    by_slot = {span.slot: span for span in spans}
    return [
        Row(by_slot[slot], position)
        for slot, position in zip(half.slots.tolist(), half.positions.tolist(), strict=True)
    ]


@settings(max_examples=200, deadline=None)
@given(span_lists(), st.sampled_from([1, 4]))
def test_every_row(spans: list[Span], pair_ring: int) -> None:
    made = arrange(spans, pair_ring, CPU)
    encoder, decoder = rows_of(made.encoder, spans), rows_of(made.decoder, spans)
    assert len(encoder) == sum(span.count for span in spans)
    for span, start in zip(spans, made.starts.tolist(), strict=True):
        assert encoder[start : start + span.count] == [Row(span, position) for position in range(span.first, span.end)]
    wanted = {
        (span.slot, position) for span in spans for position in range(max(span.first, span.decoder_from), span.end)
    }
    assert {(row.span.slot, row.position) for row in decoder} == wanted
    assert len(decoder) == len(wanted)
    assert [encoder[row] for row in made.decoder_rows.tolist()] == decoder
    assert made.encoder.lowest.tolist() == [row.span.floor for row in encoder]
    assert made.decoder.lowest.tolist() == [row.lowest_decoded for row in decoder]
    sampled = [decoder[row] for row in made.sample_rows.tolist()]
    assert sampled == [Row(span, span.end - 1) for span in spans if span.sample]
    check_groups(made.encoder, [row.span.floor for row in encoder])
    check_groups(made.decoder, [max(row.span.floor, row.span.decoder_from) for row in decoder])
    check_pairs(made, encoder, pair_ring)


def check_groups(half: Half, floors: list[int]) -> None:
    """Groups cover all rows in order; their stretches are runs of one request. `floors` are those of the rows."""
    covered = 0
    for group in half.groups:
        assert group.start == covered
        assert group.count > 0
        positions, slots = group.view(half.positions), group.view(half.slots)
        assert torch.equal(positions, group.firsts[:, None] + torch.arange(group.count))
        assert torch.equal(slots, group.slots[:, None].expand_as(slots))
        assert group.ends == tuple((group.firsts + group.count).tolist())
        assert group.longest == max(group.ends)
        assert group.floors.tolist() == floors[covered :: group.count][: len(group.ends)]
        covered += len(group.ends) * group.count
    assert covered == len(floors)


def check_pairs(made: Arrangement, encoder: list[Row], pair_ring: int) -> None:
    """Entries that are due, with the partner of each, wherever it stands."""
    due = [row for row, at in enumerate(encoder) if at.position >= at.span.write_from]
    assert made.singles.tolist() == due
    pairs = made.pairs
    assert pairs.rows.tolist() == [row for row in due if encoder[row].position % 2]
    pending = list(zip(pairs.pending_slots.tolist(), pairs.pending_positions.tolist(), strict=True))
    used = set()
    for row, partner in zip(pairs.rows.tolist(), pairs.partners.tolist(), strict=True):
        at = encoder[row]
        if partner < len(encoder):
            assert encoder[partner] == Row(at.span, at.position - 1)
        else:
            assert at.position == at.span.first
            assert pending[partner - len(encoder)] == (at.span.slot, at.position - 1)
            used.add(partner - len(encoder))
    assert used == set(range(len(pending)))
    kept = {
        row for row, at in enumerate(encoder) if at.position % 2 == 0 and at.position >= at.span.end - 2 * pair_ring
    }
    assert set(pairs.kept.tolist()) == kept


def decode(number: int, position: int, slot: int | None = None) -> Span:
    return Span(number, number if slot is None else slot, position, 1, None, 0, 0, 0, 0, True)


class TestGroups:
    def test_decode_rows_of_similar_lengths_share_a_group(self) -> None:
        made = arrange([decode(n, 10 + 13 * n) for n in range(50)], 1, CPU)
        assert len(made.encoder.groups) == 1
        assert made.encoder.groups[0].view(made.encoder.positions).shape == (50, 1)

    def test_a_long_request_does_not_make_the_short_ones_pay(self) -> None:
        made = arrange([decode(0, 100), decode(1, 200_000), decode(2, 300), decode(3, 150_000)], 1, CPU)
        assert sorted(group.ends for group in made.encoder.groups) == [(101, 301), (200_001, 150_001)]

    def test_sampled_rows_come_in_the_order_of_the_plan(self) -> None:
        """Whatever groups they fall into."""
        chunk = Span(1, 1, 0, 7, tuple(range(7)), 0, 0, 0, 0, True)
        made = arrange([decode(0, 5000), chunk, decode(2, 7)], 1, CPU)
        assert made.decoder.positions[made.sample_rows].tolist() == [5000, 6, 7]
        assert made.decoder.slots[made.sample_rows].tolist() == [0, 1, 2]

    def test_no_decoder_rows(self) -> None:
        made = arrange([Span(0, 0, 0, 7, tuple(range(7)), 0, 0, 50, 50, False)], 1, CPU)
        assert made.decoder.groups == ()
        assert [len(part) for part in (made.decoder.positions, made.decoder_rows, made.sample_rows)] == [0, 0, 0]

    def test_sampling_without_decoder_rows_is_an_error(self) -> None:
        spans = [decode(4, 3), Span(5, 5, 0, 7, tuple(range(7)), 0, 0, 50, 50, True)]
        with pytest.raises(ValueError, match="request 5 is to be sampled, but its rows stop before the decoder half"):
            arrange(spans, 1, CPU)

    def test_integers_are_wide(self) -> None:
        made = arrange([decode(0, 1_000_000)], 1, CPU)
        assert made.encoder.positions.dtype is torch.int64
        assert made.starts.dtype == np.int64
