"""Answers by rule: the integer in the last box, the letter after the last `ANSWER:`, in every spelling models use."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.harness.extraction import answer_letter, boxed_integer, boxes, integer

# Every text gives 42.
FORTY_TWO = r"""
\boxed{42}
\boxed{ 42 }
The answer is \boxed{42}.
$\boxed{42}$
$$\boxed{42}$$
\[\boxed{42}\]
\(\boxed{42}\)
**\boxed{42}**
\boxed {42}
\boxed 42
\boxed42
\fbox{42}
\boxed{042}
\boxed{0042}
\boxed{+42}
\boxed{+ 42}
\boxed{42.}
\boxed{42.0}
\boxed{42.000}
\boxed{$42$}
\boxed{\$42}
\boxed{\text{42}}
\boxed{\text{ 42 }}
\boxed{\textbf{42}}
\boxed{\mathbf{42}}
\boxed{\mathrm{42}}
\boxed{\boldsymbol{42}}
\boxed{\bm{42}}
\boxed{\mathbf{\text{42}}}
\boxed{\boxed{42}}
\boxed{{42}}
\boxed{{{42}}}
\boxed{(42)}
\boxed{\left(42\right)}
\boxed{\displaystyle 42}
\boxed{\, 42 \,}
\boxed{\ 42}
\boxed{~42~}
\boxed{42\quad}
\boxed{\!42}
\boxed{42\%}
\boxed{42%}
\boxed{42^\circ}
\boxed{42^{\circ}}
\boxed{42°}
\boxed{42\degree}
\boxed{42\text{ cm}}
\boxed{42\ \text{square units}}
\boxed{42 \mathrm{km}}
\boxed{42 apples}
\boxed{42 square metres}
\boxed{n = 42}
\boxed{m+n=42}
\boxed{m + n = 17 + 25 = 42}
\boxed{x=\text{42}}
\boxed{\text{The sum is }42}
\boxed{٤٢}
\boxed{۴۲}
\boxed{４２}
\boxed{४२}
\boxed{৪২}
\boxed{๔๒}
\boxed{𝟒𝟐}
\boxed{٠٤٢}
First \boxed{7}, then \boxed{42}
\boxed{7} \boxed{8} \boxed{9} so \boxed{42}
\boxed{x^{2}} is wrong; \boxed{42}
\boxed{\frac{1}{2}} no: \boxed{42}
\boxed{42} and an unfinished \boxed{43
\boxed{42} \boxed
Nested {{\boxed{42}}}
\boxed{42}}}}
{{{ \boxed{42}
a \} b \boxed{42} \{
So \boxed{42} % \text{done}
<b>\boxed{42}</b>
""".strip().split("\n")

OTHER_NUMBERS = {
    r"\boxed{0}": 0,
    r"\boxed{000}": 0,
    r"\boxed{-7}": -7,
    r"\boxed{−7}": -7,
    r"\boxed{- 7}": -7,
    r"\boxed{-0}": 0,
    r"\boxed{999}": 999,
    r"\boxed{1,234}": 1234,
    r"\boxed{1{,}234}": 1234,
    r"\boxed{1,\!234}": 1234,
    r"\boxed{1\,234}": 1234,
    r"\boxed{1 234 567}": 1234567,
    r"\boxed{12,345,678}": 12345678,
}

NO_INTEGER = r"""
42
The answer is 42.
boxed{42}
\box
\boxed
\boxed{}
\boxed{ }
\boxed{42
\boxed{{42}
\boxed{x}
\boxed{forty-two}
\boxed{42.5}
\boxed{4.2e1}
\boxed{42, 43}
\boxed{42 or 43}
\boxed{42; 43}
\boxed{12,34}
\boxed{1, 234}
\boxed{\frac{84}{2}}
\boxed{84/2}
\boxed{6 \cdot 7}
\boxed{6 \times 7}
\boxed{42!}
\boxed{4²}
\boxed{4^2}
\boxed{42_{10}}
\boxed{42x}
\boxed{42\pi}
\boxed{42 pi}
\boxed{42 million}
\boxed{\sqrt{42}}
\boxed{42 = n}
\boxed{\{42\}}
\boxed{[42]}
\boxed{四十二}
\boxed{ⅩⅬⅡ}
\boxed{½}
\boxed{④②}
\boxed{42-}
\boxed{--42}
\boxed{42} but rather \boxed{x}
\boxed{42} hence \boxed{}
\boxedx{42}
\boxes{42}
""".strip().split("\n")

# Every text gives C of four choices.
LETTER_C = r"""
ANSWER: C
ANSWER:C
ANSWER : C
ANSWER:   C
ANSWER: c
Answer: C
answer: c
AnSwEr: C
FINAL ANSWER: C
The answer: C
**ANSWER: C**
**ANSWER:** C
**ANSWER**: C
*ANSWER: C*
__ANSWER: C__
`ANSWER: C`
ANSWER: `C`
ANSWER: **C**
ANSWER: *C*
ANSWER: _C_
ANSWER: "C"
ANSWER: 'C'
ANSWER: (C)
ANSWER: ( C )
ANSWER: [C]
ANSWER: {C}
ANSWER: <C>
ANSWER: C)
ANSWER: C.
ANSWER: C:
ANSWER: C;
ANSWER: C,
ANSWER: C!
ANSWER: C) 5 metres
ANSWER: C. Because the field vanishes.
ANSWER: C, because the field vanishes
ANSWER: C - the third
ANSWER: C — the third
ANSWER: C (the third)
ANSWER: C is right
ANSWER: Option C
ANSWER: option C
ANSWER: Choice C
ANSWER: (option C)
ANSWER: $C$
ANSWER: $\boxed{C}$
ANSWER: \boxed{C}
ANSWER: \text{C}
ANSWER: $\text{C}$
ANSWER: \textbf{C}
ANSWER: \mathbf{C}
ANSWER: $\boxed{\text{C}}$
ANSWER: \(C\)
ANSWER:~C
ANSWER: \ C
ANSWER：C
ANSWER: Ｃ
ANSWER：Ｃ
ANSWER: 𝐂
# ANSWER: C
- ANSWER: C
> ANSWER: C
(ANSWER: C)
<answer>ANSWER: C</answer>
Answer: A is tempting. ANSWER: C
ANSWER: B no wait, ANSWER: C
ANSWER: ANSWER: C
ANSWER: The answer: C
""".strip().split("\n")

LINES_WITH_C = [
    "ANSWER:\nC",
    "ANSWER:\n\n  **C**",
    "ANSWER: C\n",
    "ANSWER: C\n\nI am sure.",
    "ANSWER: C\nA is wrong.",
    "ANSWER: C\r\nB",
    "ANSWER: A\nANSWER: B\nANSWER: C",
    "ANSWER:\tC",
    "ANSWER: C\u200b",
]

NO_LETTER = r"""
C
The answer is C.
ANSWER C
ANSWER
ANSWER:
ANSWER: ?
ANSWER: none
ANSWER: None of them
ANSWER: The third
ANSWER: 3
ANSWER: III
ANSWER: E
ANSWER: Z
ANSWER: CD
ANSWER: Cat
ANSWER: C3
ANSWER: C's
ANSWER: C or D
ANSWER: C and D
ANSWER: C, D
ANSWER: C/D
ANSWER: C & D
ANSWER: C; D
ANSWER: (C) or (D)
ANSWER: (C), (D)
ANSWER: b or c
ANSWER: A B
ANSWER: A, B, C
ANSWER: not C
ANSWER: ℃
ANSWER: С
ANSWER: Γ
ANSWER: ③
ANSWER: ج
ANSWERS: C
MYANSWER: C
ANSWER= C
ANSWER -> C
ANSWER: -
\boxed{C}
ANSWER: C. On reflection, ANSWER: unclear
""".strip().split("\n")


def test_there_are_a_hundred_spellings_of_each() -> None:
    assert len(FORTY_TWO) + len(OTHER_NUMBERS) + len(NO_INTEGER) >= 100
    assert len(LETTER_C) + len(NO_LETTER) >= 100


@pytest.mark.parametrize("text", FORTY_TWO)
def test_spellings_of_an_integer(text: str) -> None:
    assert boxed_integer(text) == 42


@pytest.mark.parametrize(("text", "value"), OTHER_NUMBERS.items())
def test_other_integers(text: str, value: int) -> None:
    assert boxed_integer(text) == value


@pytest.mark.parametrize("text", ["", *NO_INTEGER])
def test_what_is_no_boxed_integer(text: str) -> None:
    assert boxed_integer(text) is None


@pytest.mark.parametrize("text", [*LETTER_C, *LINES_WITH_C])
def test_spellings_of_a_letter(text: str) -> None:
    assert answer_letter(text) == "C"


@pytest.mark.parametrize("text", ["", *NO_LETTER])
def test_what_is_no_letter(text: str) -> None:
    assert answer_letter(text) is None


def test_choices_beyond_four_are_letters_where_there_are_so_many() -> None:
    assert answer_letter("ANSWER: J", 10) == "J"
    assert answer_letter("ANSWER: K", 10) is None
    assert answer_letter("ANSWER: C or J", 10) is None


@given(st.integers(-(10**30), 10**30))
def test_every_integer_is_found(value: int) -> None:
    for text in (f"\\boxed{{{value}}}", f"\\boxed{{{value:,}}}", f"\\boxed{{x = {value}.0}}"):
        assert boxed_integer(text) == value


@given(st.text(alphabet="\\boxed{}ANSWER: ,.42CD\n$()*²٤", max_size=60))
def test_no_text_is_too_odd(text: str) -> None:
    assert boxed_integer(text) is None or isinstance(boxed_integer(text), int)
    assert answer_letter(text) in (None, *"ABCD")
    assert all(isinstance(content, str) for content in boxes(text))
    json.dumps(integer(text))


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 60_000, "\\boxed{" + "9" * 400_000 + "}", "{" * 400_000, "ANSWER: " * 60_000, "\\text{" * 60_000],
    ids=["boxes", "digits", "braces", "answers", "wrappers"],
)
def test_endless_repetition_takes_no_time(text: str) -> None:
    begin = time.process_time()
    assert boxed_integer(text) is None
    assert answer_letter(text) is None
    assert time.process_time() - begin < 5
