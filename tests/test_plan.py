"""The nouns of a step."""

import dataclasses

import pytest

from deepinfer.core.plan import PageLoad, Plan, Span


def span(first: int, count: int) -> Span:
    return Span(1, 0, first, count, tuple(range(count)), 0, 0, 0, 0, True)


def test_a_span_ends_after_its_last_row():
    assert span(5, 3).end == 8


def test_a_plan_counts_its_rows():
    assert Plan(0, (span(5, 3), span(0, 1))).rows == 4
    assert Plan(0, ()).rows == 0


@pytest.mark.parametrize("noun", [span(0, 1), Plan(0, ()), PageLoad(1, b"")], ids=lambda noun: type(noun).__name__)
def test_nobody_changes_a_noun(noun: object):
    name = dataclasses.fields(noun)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, name, 3)
