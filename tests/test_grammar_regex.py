"""Regexes as grammars: what may be generated matches by Python's re, and what matches may be generated."""

import random
import re
import time

import pytest
from grammar_tools import accepts, compiler, random_regex, text_of, walk

from deepinfer.core.errors import RequestError
from deepinfer.sampling.grammar.charset import ANY, CharSet
from deepinfer.sampling.grammar.constraint import structured_output
from deepinfer.sampling.grammar.ebnf import Rules
from deepinfer.sampling.grammar.regex import MOST_REPEATS, UnsupportedError, anywhere, grammar, whole
from deepinfer.sampling.grammar.spelling import BLOCK, PlainText, repeated, times

TRICKY = [
    *(r"a.b", r"[^a]{2}", r"\s+", r"\S\W\D", r"^ab$", r"a*?b", r"a{,3}", r"a|b|", r"", r"()", r"\Aab\Z", r"a{0}"),
    *(r"[]a]", r"[^]a]", r"^a|b$", r"\07", r"(?#c)a", r"(?x) a b", r"(?s).", r"\N{BULLET}", r"a{x}", r"[\b]", "a\nb"),
    *(r"[^\d]", r"[^\w]{2}", r"[^\W\d]{3}", r"^^a", r"a$$", r"(?P<name>a)", r"\u00e9\x41", r"[\s\S]", "(a|b){2}|^c"),
]


def found_anywhere(pattern: str) -> str:
    rules = Rules()
    return rules.text(anywhere(pattern, PlainText(rules)))


def walked(ebnf: str, rng: random.Random, count: int = 4) -> list[str]:
    found = (walk(ebnf, rng, 15) for _ in range(count))
    return [text_of(tokens) for tokens, ended in found if ended]


@pytest.mark.parametrize("pattern", TRICKY)
def test_whatever_is_generated_matches(pattern: str) -> None:
    rng = random.Random(pattern)
    for text in walked(grammar(pattern), rng):
        assert re.fullmatch(pattern, text), text
    for text in walked(found_anywhere(pattern), rng, 3):
        assert re.search(pattern, text), text


def test_random_regexes_generate_what_they_match() -> None:
    rng = random.Random(7)
    ended = 0
    for _ in range(30):
        pattern = random_regex(rng)
        for text in walked(grammar(pattern), rng, 3):
            assert re.fullmatch(pattern, text), (pattern, text)
            ended += 1
    assert ended > 45


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"\d{3}-[a-c]+", ["123-abc"]),
        (r"[^]a]", ["b", "["]),
        (r"(yes|no)?", ["", "yes", "no"]),
        (r"a|b|", ["a", "b", ""]),
        (r"\S+", ["é", "日本"]),
        (r".", ["é", "\r"]),
    ],
)
def test_what_matches_may_be_generated(pattern: str, texts: list[str]) -> None:
    for text in texts:
        assert re.fullmatch(pattern, text)
        assert accepts(grammar(pattern), text), text


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        (r"(?=a)ab", "lookahead"),
        (r"(?<!a)b", "negative"),
        (r"\bab", "anchor"),
        (r"a^b", "anchor"),
        (r"(^a|b$)c", "anchor"),
        (r"(a)\1", "backreference"),
        (r"(a)(?(1)b)", "conditional"),
        (r"(?i)ab", "flag"),
        (r"(?i:a)b", "flag"),
        (r"a++b", "possessive"),
        (r"(?>a)b", "atomic"),
        (r"[^\s\S]", "no character"),
        (r"a{1000000}", "repetition"),
    ],
)
def test_what_no_grammar_can_say_is_refused(pattern: str, what: str) -> None:
    for translate in (whole, anywhere):
        with pytest.raises(UnsupportedError, match=what):
            translate(pattern, PlainText(Rules()))


@pytest.mark.parametrize("pattern", ["(", "[", "a{3,2}", "*", "\\", "(?P<1>a)", r"\p{L}", "a" * 10 + "("])
def test_what_is_no_regex_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="is no regular expression"):
        grammar(pattern)


@pytest.mark.parametrize("count", [300, 5000])
def test_groups_that_nest_too_deeply_are_refused(count: int) -> None:
    pattern = "(" * count + "a" + ")*" * count
    with pytest.raises(RequestError, match=r"is no regular expression|nests its groups too deeply"):
        compiler().compile(structured_output({"regex": pattern})).result()


def counts_of(low: int, high: int | None) -> set[int]:
    """How many times `repeated` lets something come, by a reading of what it writes; 400 stands for any number."""
    rules = Rules()

    def few(least: int, most: int | None) -> str:
        assert least <= BLOCK
        assert most is None or least <= most <= BLOCK
        return times("x", least, most)

    text = rules.text(repeated(rules, few, low, high))
    bodies = dict(line.split(" ::= ") for line in text.splitlines())
    return counts_in(bodies, re.findall(r"[a-z0-9]+|[()|*+?]|{[^}]*}|\"\"", bodies["root"]))


def counts_in(bodies: dict[str, str], tokens: list[str]) -> set[int]:
    ways, here = set[int](), {0}
    while tokens and tokens[0] != ")":
        token = tokens.pop(0)
        if token == "|":
            ways, here = ways | here, {0}
            continue
        if token == "(":
            item = counts_in(bodies, tokens)
            tokens.pop(0)
        elif token in bodies:
            item = counts_in(bodies, re.findall(r"[a-z0-9]+|[()|*+?]|{[^}]*}|\"\"", bodies[token]))
        else:
            item = {1} if token == "x" else {0}
        low, high = 1, 1
        if tokens and tokens[0][0] in "*+?{":
            mark = tokens.pop(0)
            bounds = {"*": "0,400", "+": "1,400", "?": "0,1"}.get(mark, mark.strip("{}")).split(",")
            low, high = int(bounds[0]), int(bounds[1] or 400)
        here = {one + more for one in here for more in repeats(item, low, high)}
        here = {min(one, 400) for one in here}
    return ways | here


def repeats(item: set[int], low: int, high: int) -> set[int]:
    found, sums = set[int](), {0}
    for count in range(high + 1):
        if count >= low:
            found |= sums
        following = {min(one + more, 400) for one in sums for more in item}
        if count >= low and following <= found:
            break
        sums = following
    return found


@pytest.mark.parametrize(
    ("low", "high"),
    [
        *((0, 0), (0, 1), (1, 1), (3, 64), (64, 64), (0, 65), (65, 65), (64, 65), (63, 130), (0, 128), (1, 129)),
        *((100, 300), (128, 128), (128, 192), (129, 399), (0, None), (1, None), (64, None), (65, None), (300, None)),
    ],
)
def test_any_number_of_times_is_said_in_small_numbers(low: int, high: int | None) -> None:
    assert counts_of(low, high) == set(range(low, (400 if high is None else high) + 1))


@pytest.mark.parametrize(
    "pattern", [r"a{999,100000}", r"(((a{50}){50}){50})", r"[^\n]{900,2000}", r"(\w+ ){190}x", r"(ab|c){300,3000}"]
)
def test_what_repeats_very_often_is_compiled_soon_and_followed(pattern: str) -> None:
    """Every token that a mask allows can be taken, too."""
    begin = time.monotonic()
    tokens, _ = walk(grammar(pattern), random.Random(pattern), 80)
    assert len(tokens) == 80
    assert time.monotonic() - begin < 30


def test_the_largest_repetition_is_named() -> None:
    with pytest.raises(UnsupportedError, match=f"has a repetition beyond {MOST_REPEATS}"):
        grammar("a{100001,}")


def test_sets_of_characters_leave_surrogates_out() -> None:
    assert CharSet.of((0, 0x10FFFF)) == ANY
    assert not ~ANY
    assert (~CharSet.chars("b")).ranges == ((0, 0x61), (0x63, 0xD7FF), (0xE000, 0x10FFFF))
    assert CharSet.of((0x61, 0x63), (0x62, 0x65), (0x66, 0x66)).ranges == ((0x61, 0x66),)
    assert CharSet.chars("abc") - CharSet.chars("b") == CharSet.chars("ac")
    assert "a" in CharSet.chars("a")
    assert "b" not in CharSet.chars("a")
    with pytest.raises(ValueError, match="no character"):
        (~ANY).ebnf()
