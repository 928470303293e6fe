"""Replies: reasoning, answer and tool calls out of the model's ids, whole or cut anywhere."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary import chat_format, tokenizer

from deepinfer.text.reply import Opening, ParsedReply, ReplyFormat
from deepinfer.text.spellings import DSML, END_THINK, EOS, THINK

ANSWER = ReplyFormat(Opening.ANSWER)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NAMES = st.sampled_from(["v41", "toy"])


def ids_of(*pieces: str, vocabulary: str = "v41") -> list[int]:
    """Encode pieces; those that are control spellings become their tokens, as the model would produce them."""
    ids: list[int] = []
    for piece in pieces:
        token_id = tokenizer(vocabulary).token_id(piece)
        ids += tokenizer(vocabulary).encode(piece) if token_id is None else [token_id]
    return ids


def calls(*names: str, block: bool = True) -> list[str]:
    """Markup of calls with a string, a number and a list as parameters, in pieces for `ids_of`."""
    pieces = ["\n\n<", DSML, " calls>\n"] if block else []
    for name in names:
        pieces += ["<", DSML, f' invoke name="{name}">\n']
        for key, value, is_string in (("s", 'a "é" \\ 漢', True), ("n", "-1.5", False), ("l", '["x", {}]', False)):
            pieces += ["<", DSML, f' parameter name="{key}" string="{str(is_string).lower()}">{value}']
            pieces += ["</", DSML, " parameter>\n"]
        pieces += ["</", DSML, " invoke>\n"]
    return [*pieces, "</", DSML, " calls>"]


ARGUMENTS = {"s": 'a "é" \\ 漢', "n": -1.5, "l": ["x", {}]}


def parse(*pieces: str, reply: ReplyFormat | None = None, vocabulary: str = "v41") -> ParsedReply:
    return chat_format(vocabulary).parse(ids_of(*pieces, vocabulary=vocabulary), reply)


class TestText:
    def test_thinking(self) -> None:
        assert parse("because", END_THINK, "ok", EOS) == ParsedReply("ok", "because", [])

    def test_direct(self) -> None:
        assert parse("ok", EOS, reply=ANSWER) == ParsedReply("ok", None, [])

    def test_cut_in_the_reasoning(self) -> None:
        assert parse("because it") == ParsedReply("", "because it", [])

    def test_cut_at_its_end(self) -> None:
        assert parse("because", END_THINK) == ParsedReply("", "because", [])

    @pytest.mark.parametrize("reply", [None, ANSWER])
    def test_nothing(self, reply: ReplyFormat | None) -> None:
        assert parse(reply=reply) == parse(EOS, reply=reply) == ParsedReply("", None, [])

    def test_nothing_after_eos_is_read(self) -> None:
        assert parse("a", END_THINK, "b", EOS, "c", EOS).content == "b"

    def test_spelled_out_markers_are_text(self) -> None:
        reply = chat_format("v41").parse(tokenizer("v41").encode("a</think>b"))
        assert reply == ParsedReply("", "a</think>b", [])

    def test_a_cut_character_is_dropped(self) -> None:
        assert chat_format("toy").parse(tokenizer("toy").encode("x🙂")[:-1], ANSWER).content == "x"

    @pytest.mark.parametrize("opening", [Opening.CONTINUED_ANSWER, Opening.CONTINUED_REASONING])
    def test_a_continuation_keeps_its_newlines(self, opening: Opening) -> None:
        reply = parse("\n\n1. x", reply=ReplyFormat(opening))
        assert (reply.content or reply.reasoning) == "\n\n1. x"

    @pytest.mark.parametrize("opening", [Opening.ANSWER, Opening.REASONING])
    def test_a_fresh_reply_does_not(self, opening: Opening) -> None:
        reply = parse("\n\nx", reply=ReplyFormat(opening))
        assert (reply.content or reply.reasoning) == "x"

    def test_a_continued_answer_follows_no_marker(self) -> None:
        assert parse("a", reply=ReplyFormat(Opening.CONTINUED_ANSWER)) == ParsedReply("a", None, [])

    def test_json_is_cut_out(self) -> None:
        reply = parse('Here:\n```json\n{"a": 1}\n```', reply=ReplyFormat(Opening.ANSWER, json=True))
        assert json.loads(reply.content) == {"a": 1}

    def test_a_broken_character_is_replaced(self) -> None:
        ids = tokenizer("toy").encode("x🙂")[:-1] + tokenizer("toy").encode("y")
        assert chat_format("toy").parse(ids, ANSWER).content == "x\ufffdy"

    @given(name=NAMES, reasoning=TEXT, content=TEXT)
    @settings(max_examples=150, deadline=None)
    def test_any_text_comes_back(self, name: str, reasoning: str, content: str) -> None:
        reasoning, content = "r" + reasoning, "c" + content
        reply = parse(reasoning, END_THINK, content, EOS, vocabulary=name)
        assert reply == ParsedReply(content, reasoning.rstrip("\n"), [])


class TestToolCalls:
    @pytest.mark.parametrize("vocabulary", ["v41", "toy"])
    def test_after_thinking_and_text(self, vocabulary: str) -> None:
        reply = parse("why", END_THINK, "ok", *calls("f", "g"), EOS, vocabulary=vocabulary)
        assert (reply.reasoning, reply.content) == ("why", "ok")
        assert [call.name for call in reply.tool_calls] == ["f", "g"]
        assert [json.loads(call.arguments) for call in reply.tool_calls] == [ARGUMENTS] * 2
        assert len({call.id for call in reply.tool_calls}) == 2

    def test_without_thinking(self) -> None:
        (call,) = parse(*calls("f"), EOS, reply=ANSWER).tool_calls
        assert (call.name, json.loads(call.arguments)) == ("f", ARGUMENTS)

    def test_in_a_block_that_the_prompt_opened(self) -> None:
        (call,) = parse(*calls("f", block=False), EOS, reply=ReplyFormat(Opening.TOOL_CALLS)).tool_calls
        assert (call.name, json.loads(call.arguments)) == ("f", ARGUMENTS)

    def test_markup_is_text_where_no_tools_were_declared(self) -> None:
        reply = parse("ok", *calls("f"), reply=ReplyFormat(Opening.ANSWER, tools=False))
        assert (reply.content, reply.tool_calls) == ("ok" + "".join(calls("f")), [])

    def test_spelled_out_markup_is_text(self) -> None:
        markup = "ok" + "".join(calls("f"))
        reply = chat_format("v41").parse(tokenizer("v41").encode(markup), ANSWER)
        assert (reply.content, reply.tool_calls) == (markup, [])

    @pytest.mark.parametrize("vocabulary", ["v41", "toy"])
    def test_cut_anywhere(self, vocabulary: str) -> None:
        ids = ids_of("why", END_THINK, "ok", *calls("f", "g"), vocabulary=vocabulary)
        whole = "".join(call.arguments for call in chat_format(vocabulary).parse(ids).tool_calls[:1])
        for end in range(len(ids)):
            reply = chat_format(vocabulary).parse(ids[:end])
            assert "why".startswith(reply.reasoning or "")
            assert "ok\n\n<".startswith(reply.content)
            assert [call.name for call in reply.tool_calls] in ([], ["f"], ["f", "g"])
            begun = [call.arguments.removesuffix("/").removesuffix("<") for call in reply.tool_calls]
            assert all(whole.startswith(arguments) for arguments in begun)

    def test_arguments_are_passed_on_unchecked(self) -> None:
        pieces = ["<", DSML, ' parameter name="days" string="false">notjson</', DSML, " parameter>\n"]
        block = ["\n\n<", DSML, " calls>\n<", DSML, ' invoke name="f">\n', *pieces, "</", DSML, " invoke>\n"]
        (call,) = parse(*block, "</", DSML, " calls>", reply=ANSWER).tool_calls
        assert call.arguments == '{"days": notjson}'


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_ids_break_the_parser(data: st.DataObject) -> None:
    name = data.draw(NAMES)
    markers = st.sampled_from([THINK, END_THINK, DSML, "<", "</", ' invoke name="f">', " calls>", "\n\n", EOS])
    pieces = data.draw(st.lists(markers | TEXT, max_size=10))
    noise = data.draw(st.lists(st.integers(0, tokenizer(name).vocab_size - 1), max_size=5))
    reply = ReplyFormat(data.draw(st.sampled_from(Opening)), data.draw(st.booleans()), data.draw(st.booleans()))
    parsed = chat_format(name).parse(ids_of(*pieces, vocabulary=name) + noise, reply)
    assert isinstance(parsed, ParsedReply)
    assert EOS not in parsed.content


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def test_a_reply_can_go_back_into_the_history() -> None:
    chat, question = chat_format("v41"), {"role": "user", "content": "q"}
    first = chat.encode([question], tools=[TOOL])
    produced = ids_of("why", END_THINK, "ok", *calls("f"), EOS)
    reply = chat.parse(produced, first.reply)
    turn = {
        "role": "assistant",
        "content": reply.content,
        "reasoning_content": reply.reasoning,
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.tool_calls
        ],
    }
    result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "42"}
    second = chat.encode([question, turn, result], tools=[TOOL])
    text = tokenizer("v41").decode(second.ids)
    assert text.startswith(tokenizer("v41").decode(first.ids) + tokenizer("v41").decode(produced[:-1]))
