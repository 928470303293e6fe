"""Stop strings: found wherever tokens end, and what precedes them is exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint.locate import resolve_model
from deepinfer.core.errors import RequestError
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.scheduler import EndRules
from deepinfer.engine.sequence import Sequence
from deepinfer.engine.stops import StopStrings, stop_strings_of
from deepinfer.text.reply import Opening, ReplyFormat
from deepinfer.text.spellings import END_THINK
from deepinfer.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_file(resolve_model(None))
TEXTS = st.text(st.sampled_from("ab \nc.é漢🎉"), max_size=40)


def cut(data: st.DataObject, text: str) -> list[int]:
    """Tokens of a text whose borders are drawn anywhere, also inside of characters."""
    ids: list[int] = []
    while text:
        size = data.draw(st.integers(1, min(5, len(text))))
        ids += TOKENIZER.encode(text[:size])
        text = text[size:]
    return ids


def first_stop(text: str, stops: list[str]) -> tuple[str, str] | None:
    """(text before, stop string) of the one that is complete first, character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return None


@settings(max_examples=120)
@given(
    st.data(), TEXTS, st.lists(st.text(st.sampled_from("ab \nc.é漢🎉"), min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_the_first_complete_stop_string_ends_the_text(data: st.DataObject, text: str, stops: list[str]) -> None:
    watch = StopStrings(tuple(stops), TOKENIZER.stream())
    found = any(watch.push(token, True) for token in cut(data, text))
    expected = first_stop(text, stops)
    assert found == (expected is not None)
    if expected is not None:
        assert (watch.text, watch.matched) == expected
        assert text.startswith(watch.text + watch.tail)
        assert watch.tail.startswith(watch.matched or "?")


@settings(max_examples=60)
@given(st.data(), TEXTS, st.integers(0, 12))
def test_a_stop_string_that_ends_too_early_does_not_count(data: st.DataObject, text: str, least: int) -> None:
    """It must end in the text of a token from number `least` on; it may begin before."""
    stops, ids = ["ab", "c"], cut(data, text)
    watch = StopStrings(tuple(stops), TOKENIZER.stream())
    found = any(watch.push(token, number >= least) for number, token in enumerate(ids, 1))
    stream = TOKENIZER.stream()
    early = sum(len(stream.push(token)) for token in ids[: max(0, least - 1)])
    ends = [end for end in range(early + 1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert found == bool(ends)
    if found:
        assert len(watch.text) + len(watch.matched or "") == ends[0]


def sequence(params: SamplingParams, reply: ReplyFormat | None = None) -> Sequence:
    rules = EndRules(1, 1000, stop_strings_of(TOKENIZER))
    return rules.sequence(Request(0, None, (5, 6), (TEXT,) * 2, (), params, 0, reply), 0, 1000)


def run(row: Sequence, ids: list[int]) -> None:
    for token in ids:
        if row.finish_reason is None:
            row.append(token)


def test_min_tokens_holds_back_stop_strings() -> None:
    ids = TOKENIZER.encode("a") * 9
    for least, count in ((0, 1), (1, 1), (4, 4)):
        row = sequence(SamplingParams(stop="a", min_tokens=least))
        run(row, ids)
        assert (len(row.generated), row.finish_reason, row.stop_reason) == (count, "stop", "a")


def test_a_stop_string_at_the_last_token_is_a_stop() -> None:
    row = sequence(SamplingParams(stop="b", max_tokens=2))
    run(row, [*TOKENIZER.encode("a"), *TOKENIZER.encode("b")])
    assert (row.finish_reason, row.stop_reason) == ("stop", "b")


@pytest.mark.parametrize(("token", "reason"), [(1, None), (9, 9)])
def test_the_reason_names_a_stop_token_but_not_the_end_of_sequence(token: int, reason: int | None) -> None:
    row = sequence(SamplingParams(stop="zz", stop_token_ids=[9]))
    run(row, [20, 21, token, 22])
    assert (row.generated, row.finish_reason, row.stop_reason) == ([20, 21, token], "stop", reason)


@pytest.mark.parametrize("opening", [Opening.REASONING, Opening.CONTINUED_REASONING])
def test_in_a_chat_stop_strings_count_after_the_reasoning(opening: Opening) -> None:
    end = TOKENIZER.token_id(END_THINK)
    assert end is not None
    row = sequence(SamplingParams(stop="x"), ReplyFormat(opening))
    ids = [*TOKENIZER.encode("a x b"), end, *TOKENIZER.encode("c x d")]
    run(row, ids)
    assert row.stop_reason == "x"
    assert row.stops is not None
    assert row.stops.text == "c "
    answering = sequence(SamplingParams(stop="x"), ReplyFormat(Opening.ANSWER))
    run(answering, ids)
    assert answering.stops is not None
    assert answering.stops.text == "a "


def test_without_a_tokenizer_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="take a tokenizer"):
        EndRules(1, 100).sequence(Request(0, None, (5,), (TEXT,), (), SamplingParams(stop="a"), 0), 0, 100)


def test_text_of_bytes_that_are_no_characters_waits_for_what_follows() -> None:
    """A lone continuation byte comes out with what follows it; the stop string behind it is found."""
    lone = TOKENIZER.encode("é")
    if len(lone) == 1:
        pytest.skip("this vocabulary has the character whole")
    watch = StopStrings(("b",), TOKENIZER.stream())
    found = [watch.push(token, True) for token in [lone[0], *TOKENIZER.encode("ab")]]
    assert found[-1]
    assert watch.text.endswith("a")
