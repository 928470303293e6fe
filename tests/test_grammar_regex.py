"""Regexes as grammars: what may be generated matches by Python's re, and what matches may be generated."""

import random
import re

import pytest
from grammar_tools import accepts, random_regex, text_of, walk

from deepinfer.core.errors import RequestError
from deepinfer.sampling.grammar.charset import ANY, CharSet
from deepinfer.sampling.grammar.regex import UnsupportedError, anywhere, whole

TRICKY = [
    *(r"a.b", r"[^a]{2}", r"\s+", r"\S\W\D", r"^ab$", r"a*?b", r"a{,3}", r"a|b|", r"", r"()", r"\Aab\Z", r"a{0}"),
    *(r"[]a]", r"[^]a]", r"^a|b$", r"\07", r"(?#c)a", r"(?x) a b", r"(?s).", r"\N{BULLET}", r"a{x}", r"[\b]", "a\nb"),
    *(r"[^\d]", r"[^\w]{2}", r"[^\W\d]{3}", r"^^a", r"a$$", r"(?P<name>a)", r"\u00e9\x41", r"[\s\S]", "(a|b){2}|^c"),
]


def walked(ebnf: str, rng: random.Random, times: int = 4) -> list[str]:
    found = (walk(f"root ::= {ebnf}", rng, 15) for _ in range(times))
    return [text_of(tokens) for tokens, ended in found if ended]


@pytest.mark.parametrize("pattern", TRICKY)
def test_whatever_is_generated_matches(pattern: str) -> None:
    rng = random.Random(pattern)
    for text in walked(whole(pattern), rng):
        assert re.fullmatch(pattern, text), text
    for text in walked(anywhere(pattern), rng, 3):
        assert re.search(pattern, text), text


def test_random_regexes_generate_what_they_match() -> None:
    rng = random.Random(7)
    ended = 0
    for _ in range(30):
        pattern = random_regex(rng)
        for text in walked(whole(pattern), rng, 3):
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
        assert accepts(f"root ::= {whole(pattern)}", text), text


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
            translate(pattern)


@pytest.mark.parametrize("pattern", ["(", "[", "a{3,2}", "*", "\\", "(?P<1>a)", r"\p{L}", "a" * 10 + "("])
def test_what_is_no_regex_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="is no regular expression"):
        whole(pattern)


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
