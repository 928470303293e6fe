"""Finds the answer in a text by rule: the integer in the last box, the letter after the last `ANSWER:`."""

import re
import unicodedata
from collections.abc import Iterator

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LONGEST = 200  # characters of a box or a line that can hold an answer
_BARE, _BRACE = re.compile(r"[+-]?\d+"), re.compile(r"\\[\\{}]|[{}]")
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_WRAPPER = re.compile(r"\\(?:text|math|f?box|mbox|bm|boldsymbol)(?:bf|it|rm|sf|tt|normal|ed)?\s*\{")
_UNIT = re.compile(
    r"\\(?:text|mathrm|mbox|textrm)\s*\{[^{}0-9]*\}|\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\(?:degree|%)|[°%]"
)
_WORD = re.compile(r" +(?!hundred|thousand|million|billion|dozen|pi\b)[A-Za-z]{2}[A-Za-z. ]*$")
_SPACE = re.compile(r"\\[,;: ()\[\]]|\\(?:quad|qquad|left|right|displaystyle)(?![A-Za-z])|[$~\s]|\{\}")
_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.0*)?")
NAMED = re.compile(r"(?<![^\W_])answer[\s*_`\"']*:", re.IGNORECASE)
_LETTER = re.compile(r"(?:(?:option|choice)\s*)?\(?([A-Z])(?![A-Za-z0-9]|['’][A-Za-z])[).:*_`\"'\]}]*", re.IGNORECASE)
_JOINT = r"\s*(?:,|/|;|&|or\b|and\b)\s*\(?[{0}](?![A-Za-z0-9]|['’][A-Za-z])|\s+\(?[{0}]\)?\s*$"


def boxed_integer(text: str) -> int | None:
    """The integer in the last complete `\\boxed{}` of a text; None if there is no box, or no integer in it."""
    contents = list(boxes(text))
    return integer(contents[-1]) if contents else None


def boxes(text: str) -> Iterator[str]:
    """What stands in each outermost `\\boxed` or `\\fbox`, in order; a box that is not closed is none."""
    ends = _closing_braces(text)
    at = 0
    while found := _BOX.search(text, at):
        at = found.end()
        if at in ends:
            yield text[at + 1 : ends[at]]
            at = ends[at]
        elif bare := _BARE.match(text, at):
            yield bare.group()
            at = bare.end()


def _closing_braces(text: str) -> dict[int, int]:
    """The place of the closing brace of each one that opens; braces after a backslash are text."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for found in _BRACE.finditer(text):
        if found.group() == "{":
            opened.append(found.start())
        elif found.group() == "}" and opened:
            ends[opened.pop()] = found.start()
    return ends


def integer(text: str) -> int | None:
    """The integer that a short text spells, with its usual decorations; None if it spells anything else.

    Taken: signs, leading zeros, digits of any script, thousands in groups of three, a decimal point with nothing but
    zeros behind it, dollar signs, spaces, text commands, units without digits, the left side of an equation.
    """
    if len(text) > _LONGEST:
        return None
    plain = unicodedata.normalize("NFKC", _ascii_digits(text)).replace("−", "-")
    plain = plain.replace("{,}", ",").replace("\\!", "").replace("\\$", "").rsplit("=", 1)[-1]
    plain = _SPACE.sub(" ", _unwrapped(_UNIT.sub(" ", plain))).strip(" {}()")
    plain = re.sub(r"^([+-]) +", r"\1", plain)
    plain = _WORD.sub("", plain.rstrip(" ."))
    plain = re.sub(r"(?<=\d) (?=\d{3}(?:\D|$))", ",", plain)
    if not _NUMBER.fullmatch(plain):
        return None
    return int(plain.replace(",", "").partition(".")[0])


def _ascii_digits(text: str) -> str:
    """Decimal digits of every script as those of ASCII; superscripts and numerals such as ² and Ⅻ are no digits."""
    digits = (str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)
    return "".join("\ufffd" if char.isnumeric() and not char.isascii() else char for char in digits)


def _unwrapped(text: str) -> str:
    """Take `\\text{42}` and its like for 42, however deep."""
    while found := _WRAPPER.search(text):
        end = _closing_braces(text).get(found.end() - 1)
        if end is None:
            return text
        text = f"{text[: found.start()]} {text[found.end() : end]} {text[end + 1 :]}"
    return text


def answer_letter(text: str, choices: int = 4) -> str | None:
    """The letter of one of so many choices after the last `ANSWER:` of a text; None for none, or more than one."""
    text = unicodedata.normalize("NFKC", text)
    named = list(NAMED.finditer(text))
    if not named:
        return None
    line = text[named[-1].end() :].lstrip().partition("\n")[0]
    line = _SPACE.sub(" ", _unwrapped(line[:_LONGEST])).lstrip(" *_`\"'[{(<")
    found = _LETTER.match(line)
    if found is None:
        return None
    letters = LETTERS[:choices] if found[1].isupper() else LETTERS[:choices].lower()
    if found[1] not in letters or re.compile(_JOINT.format(letters)).match(line, found.end()):
        return None
    return found[1].upper()
