"""Matchers: masks, taking back, blocks of drafts, thinking; and grammars that do not compile."""

import random
import time
from functools import cache

import numpy as np
import pytest
import torch
import vocabulary
from grammar_tools import PADDED, Case, allowed_ids, cases, compiler, matcher_of, text_of, tokenizer, walk

from deepinfer.core.errors import EngineError, RequestError
from deepinfer.sampling.grammar import compiler as compiling
from deepinfer.sampling.grammar.compiler import Compiler
from deepinfer.sampling.grammar.constraint import Constraint, structured_output
from deepinfer.sampling.grammar.matcher import Matcher
from deepinfer.sampling.grammar.tools import tool_calls
from deepinfer.sampling.grammar.vocabulary import Vocabulary
from deepinfer.text.spellings import DSML, END_THINK

EOS = compiler().vocabulary.eos
ANYTHING = r'root ::= ([\u0000-\ud7ff\ue000-\U0010ffff] | "x")*'


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def test_added_tokens_are_never_allowed_and_padding_neither() -> None:
    added = tokenizer().added_ids
    for ebnf in (ANYTHING, "root ::= [^a]*", structured_output({"json_schema": True}).ebnf):
        matcher = matcher_of(ebnf)
        for token in (None, *ids('"hello ')):
            if token is not None:
                matcher.take(token)
            allowed = set(allowed_ids(matcher))
            assert not allowed & (added - {EOS})
            assert max(allowed) < tokenizer().vocab_size < PADDED


def test_the_end_is_allowed_where_the_grammar_may_end_and_forced_where_it_must() -> None:
    matcher = matcher_of('root ::= "ab" "c"?')
    assert EOS not in allowed_ids(matcher)
    for token in ids("ab"):
        matcher.take(token)
    assert EOS in allowed_ids(matcher)
    matcher.take(ids("c")[0])
    assert allowed_ids(matcher) == [EOS]
    matcher.take(EOS)
    assert matcher.ended
    assert len(allowed_ids(matcher)) == PADDED  # nobody uses what is drawn now
    with pytest.raises(EngineError, match="does not allow token"):
        matcher.take(ids("a")[0])


def test_a_forbidden_token_changes_nothing() -> None:
    matcher = matcher_of('root ::= "ab"')
    before = allowed_ids(matcher)
    for token in (ids("z")[0], EOS, -1, PADDED - 1, 10**6, tokenizer().token_id(DSML) or 0):
        with pytest.raises(EngineError, match="after 0 tokens"):
            matcher.take(token)
    assert (matcher.length, allowed_ids(matcher)) == (0, before)


def test_any_number_of_tokens_can_be_taken_back() -> None:
    rng = random.Random(3)
    ebnf = structured_output({"json_schema": {"items": {"enum": ["ab", 12]}}}).ebnf
    matcher, masks, taken = matcher_of(ebnf), [], []
    for _ in range(30):
        allowed = allowed_ids(matcher)
        masks.append(allowed)
        if matcher.ended:
            break
        taken.append(rng.choice(allowed))
        matcher.take(taken[-1])
    for _ in range(20):
        length = rng.randint(0, len(taken))
        matcher.rewind(min(length, matcher.length))
        for token in taken[matcher.length : length]:
            matcher.take(token)
        if length < len(masks):
            assert allowed_ids(matcher) == masks[length]
    with pytest.raises(ValueError, match="are to stay"):
        matcher.rewind(matcher.length + 1)


def test_put_replaces_what_was_taken() -> None:
    matcher = matcher_of('root ::= [a-z] [0-9] "."')
    a, b, one = (ids(text)[0] for text in "ab1")
    matcher.put(0, a)
    matcher.put(1, one)
    matcher.put(0, a)
    assert matcher.length == 2
    matcher.put(0, b)
    assert matcher.length == 1
    matcher.put(1, one)
    assert matcher.length == 2


def rows(count: int) -> torch.Tensor:
    return torch.zeros((count, compiler().vocabulary.words), dtype=torch.int32)


def unpacked(bits: torch.Tensor) -> list[int]:
    return [token for token in range(PADDED) if int(bits[token // 32]) >> token % 32 & 1]


@pytest.mark.parametrize(("draft", "legal"), [("12.", 3), ("1x.", 1), ("x", 0), ("12.9", 3), ("", 0)])
def test_a_block_is_walked_up_to_its_first_illegal_draft(draft: str, legal: int) -> None:
    ebnf = 'root ::= [0-9] [0-9] "."'
    matcher, other = matcher_of(ebnf), matcher_of(ebnf)
    drafts = [ids(char)[0] for char in draft]
    bits = rows(len(drafts) + 1)
    assert matcher.legal(drafts) == legal
    assert matcher.length == 0
    matcher.walk(drafts[:legal], bits)
    assert matcher.length == 0
    for place in range(legal + 1):
        assert unpacked(bits[place]) == allowed_ids(other)
        if place < legal:
            other.take(drafts[place])


@pytest.mark.parametrize("case", cases(24, seed=8), ids=lambda case: case.kind)
def test_what_is_legal_is_what_the_masks_allow(case: Case) -> None:
    """Blocks drawn from the masks, with a token at one place that need not be among them."""
    rng, ebnf = random.Random(3), structured_output(case.so_args).ebnf
    for _ in range(4):
        tokens, _ = walk(ebnf, rng, 6)
        start = rng.randint(0, len(tokens))
        drafts = [*tokens[start:], EOS, 0]
        drafts[rng.randrange(len(drafts))] = rng.randrange(PADDED)
        matcher, other = matcher_of(ebnf), matcher_of(ebnf)
        for token in tokens[:start]:
            matcher.take(token)
            other.take(token)
        legal = 0
        while legal < len(drafts) and not other.ended and drafts[legal] in allowed_ids(other):
            other.take(drafts[legal])
            legal += 1
        assert matcher.legal(drafts) == legal
        assert matcher.length == start


def test_a_block_may_end_the_reply() -> None:
    matcher = matcher_of('root ::= "a"')
    assert matcher.legal([ids("a")[0], EOS, ids("a")[0]]) == 2
    matcher.walk([ids("a")[0], EOS], rows(3))
    assert not matcher.ended


def test_the_grammar_holds_from_the_end_of_the_thinking_on() -> None:
    end = tokenizer().token_id(END_THINK)
    assert end is not None
    matcher = matcher_of('root ::= "ab"', end_thinking=end)
    free = set(allowed_ids(matcher))
    assert end in free
    assert EOS not in free
    assert free - {end} == set(range(tokenizer().vocab_size)) - tokenizer().added_ids
    for token in [*ids("Hm, ab?"), end]:
        matcher.take(token)
    assert set(allowed_ids(matcher)) <= set(ids("ab") + ids("a"))
    thought = matcher.length
    matcher.take(ids("a")[0])
    matcher.rewind(thought - 1)
    assert set(allowed_ids(matcher)) == free
    # The thinking ends, and the answer begins, inside a block.
    drafts = [end, ids("a")[0], ids("b")[0], EOS]
    assert matcher.legal(drafts) == 4
    bits = rows(5)
    matcher.walk(drafts, bits)
    assert set(unpacked(bits[1])) == set(ids("ab") + ids("a"))
    assert matcher.legal([end, ids("z")[0]]) == 1
    assert matcher.legal([EOS]) == matcher.legal([tokenizer().token_id(DSML) or 0]) == 0
    assert matcher.length == thought - 1


@pytest.mark.parametrize(
    ("ebnf", "message"),
    [
        ("root ::= x", 'Rule "x" is not defined'),
        ('x ::= "a"', 'root rule with name "root" is not found'),
        ("root ::= [a", "Unterminated character class"),
        ("", "not found"),
        ("root ::= root", "matches nothing"),
        ("root ::= Token(4092)", "matches nothing"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "Nest layer"),
    ],
)
def test_a_grammar_that_does_not_compile_is_one_clear_error(ebnf: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        compiler().compile(structured_output({"ebnf": ebnf})).result()
    assert str(caught.value).startswith("so_args['ebnf'] ")
    assert "/project/" not in str(caught.value)


@pytest.mark.parametrize("count", ["{129}", "{0,1000}", "{129,}", "{ 1 , 200 }", "{5,99999999999}"])
def test_counts_that_the_compiler_gets_wrong_are_refused(count: str) -> None:
    with pytest.raises(RequestError, match=r"repeats something .* counts up to 128"):
        structured_output({"ebnf": f'root ::= "x" ([a-z]{count} | "y")'})


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [{}, {"minLength": 1}, {"minLength": 3, "maxLength": 40}, {"maxLength": 500}], ids=str
)
def test_masks_within_strings_are_soon_filled_for_a_large_vocabulary(lengths: dict[str, int]) -> None:
    """Trying all 129,280 tokens would take 100 ms or more; and what a mask allows can be taken."""
    schema = {"type": "array", "items": {"type": "string", **lengths}, "minItems": 32}
    matcher = Matcher(large_compiler().compile(structured_output({"json_schema": schema})).result())
    bits, rng, times = torch.zeros((1, large_compiler().vocabulary.words), dtype=torch.int32), random.Random(1), []
    for _ in range(60):
        begin = time.process_time()
        matcher.fill(bits)
        times.append(time.process_time() - begin)
        allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little"))
        longer = [int(token) for token in allowed if token != EOS]
        matcher.take(rng.choice(longer))
    assert sorted(times)[len(times) // 2] < 0.02


@cache
def large_compiler() -> Compiler:
    return Compiler(Vocabulary(vocabulary.tokenizer("v41"), 129280, EOS))


def test_braces_that_repeat_nothing_are_let_be() -> None:
    ebnf = 'root ::= "{200}\\"{201}" [{202}\\]{203}]{128} # {204}'
    assert structured_output({"ebnf": ebnf}).ebnf == ebnf
    compiler().compile(structured_output({"ebnf": ebnf})).result()


def test_equal_grammars_compile_once_and_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "CACHED", 2)
    own = Compiler(compiler().vocabulary)
    grammars = [structured_output({"ebnf": f'root ::= "{char}"'}) for char in "abc"]
    first = own.compile(grammars[0])
    assert own.compile(structured_output({"ebnf": 'root ::= "a"'})) is first
    for grammar in grammars[1:]:
        own.compile(grammar)
    assert own.compile(grammars[0]) is not first
    assert own.compile(grammars[0]).result() is not first.result()


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"enum": ["C", "F", 0]},
                    "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
D = tokenizer().token_id(DSML) or 0


def call(text: str) -> list[int]:
    """Tokens of a reply in which § stands for the markup token."""
    found: list[int] = []
    for place, part in enumerate(text.split("§")):
        found += [D] * bool(place) + ids(part)
    return found


def allows(ebnf: str, tokens: list[int]) -> bool:
    matcher = matcher_of(ebnf, markup=True)
    for token in tokens:
        if token not in allowed_ids(matcher):
            return False
        matcher.take(token)
    return EOS in allowed_ids(matcher)


CITY = '<§ parameter name="city" string="true">{}</§ parameter>\n'
WEATHER = 'Sure\n\n<§ calls>\n<§ invoke name="weather">\n{}</§ invoke>\n</§ calls>'


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Just text, < and </ too.", True),
        (WEATHER.format(CITY.format("Paris </x")), True),
        (WEATHER.format(CITY.format("") + '<§ parameter name="days" string="false">3</§ parameter>\n'), True),
        (WEATHER.format(CITY.format("a") + '<§ parameter name="unit" string="true">C</§ parameter>\n'), True),
        (WEATHER.format(CITY.format("a") + '<§ parameter name="unit" string="false">0</§ parameter>\n'), True),
        (WEATHER.format(CITY.format("a") + '<§ parameter name="note" string="false">null</§ parameter>\n'), True),
        ('<§ calls>\n<§ invoke name="now">\n\n</§ invoke>\n<§ invoke name="now">\n</§ invoke>\n</§ calls>', True),
        (WEATHER.format(""), False),  # a required argument is missing
        (WEATHER.format('<§ parameter name="days" string="false">3</§ parameter>\n'), False),
        (WEATHER.format(CITY.format("a") + '<§ parameter name="days" string="false">10</§ parameter>\n'), False),
        (WEATHER.format(CITY.format("a") + '<§ parameter name="days" string="true">3</§ parameter>\n'), False),
        (WEATHER.format(CITY.format("a") + '<§ parameter name="unit" string="true">K</§ parameter>\n'), False),
        (WEATHER.format(CITY.format("a") + '<§ parameter name="note" string="true">long</§ parameter>\n'), False),
        (WEATHER.format(CITY.format("a")).replace("weather", "wether"), False),
        (WEATHER.format(CITY.format("a")) + " and more", False),  # a block of calls ends the reply
        ("Text § text", False),
        ("<§ calls>\n</§ calls>", False),
    ],
)
def test_tool_calls_follow_their_form_and_schemas(text: str, good: bool) -> None:
    assert allows(tool_calls(TOOLS, D).ebnf, call(text)) == good


def test_what_only_looks_like_markup_is_text() -> None:
    assert allows(tool_calls(TOOLS, D).ebnf, ids(f"<{DSML} calls>\n<{DSML} invoke"))


def test_a_block_that_the_prompt_opened_goes_on_with_a_call() -> None:
    ebnf = tool_calls(TOOLS, D, open_block=True).ebnf
    assert allows(ebnf, call('<§ invoke name="now">\n</§ invoke>\n</§ calls>'))
    assert not allows(ebnf, call("text"))


def test_random_calls_are_parsed_with_valid_arguments() -> None:
    import json

    import jsonschema

    from deepinfer.text.reply import Opening, ReplyFormat, ReplyParser

    ebnf, parser, rng = tool_calls(TOOLS, D, open_block=True).ebnf, ReplyParser(tokenizer()), random.Random(5)
    validator = jsonschema.Draft202012Validator(TOOLS[0]["function"]["parameters"])  # type: ignore[index]
    calls = 0
    for _ in range(6):
        tokens, ended = walk(ebnf, rng, 250, markup=True)
        if ended:
            for one in parser.parse(tokens, ReplyFormat(Opening.TOOL_CALLS)).tool_calls:
                assert one.name in ("weather", "now")
                if one.name == "weather":
                    validator.validate(json.loads(one.arguments))
                calls += 1
    assert calls > 2


def test_what_a_tool_asks_for_in_vain_is_named() -> None:
    schema = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}, "minProperties": 1}
    found = tool_calls([{"type": "function", "function": {"name": "f", "parameters": schema}}], D)
    paths = ("tools[0].function.parameters.minProperties", "tools[0].function.parameters.properties.tags.uniqueItems")
    assert found.unenforced == paths


@pytest.mark.parametrize("parameters", [3, {"type": "array"}, {"properties": 3}, {"properties": {"a": {"type": "x"}}}])
def test_parameters_that_are_no_schema_of_an_object_are_refused(parameters: object) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters"):
        tool_calls([{"type": "function", "function": {"name": "f", "parameters": parameters}}], D)


def test_compiled_grammars_leave_text_alone() -> None:
    assert text_of(ids("é\n<|x|>")) == "é\n<|x|>"
    assert compiler().compile(Constraint("test", ANYTHING)).result().thinking.shape == (compiler().vocabulary.words,)
