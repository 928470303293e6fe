"""Finding what was said thousands of tokens ago: one passkey, or many named codes asked for in turn."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from train.sample import Sample, Split, user
from train.words import COLOURS, THINGS, plain_sentence

STATEMENTS = (
    "The passkey is {key}. Remember it.",
    "Remember this: the passkey is {key}.",
    "Important: the passkey is {key}. You will need it later.",
    "The passkey is {key}.",
)
QUESTIONS = ("What is the passkey?", "Which passkey was given above?", "Tell me the passkey.", "What was the passkey?")
OPENINGS = ("A passkey is hidden in this text.", "Read this text; it states a passkey.", "")
# Tokens besides the filler: template, opening, statement, question, answer.
OVERHEAD = 96
# Characters of a piece of filler, and tokens that a generated sentence stays below.
LONGEST_PIECE = 360
SENTENCE = 40
# Tokens of the empty line after a paragraph.
BREAK = 2


@dataclass(frozen=True)
class Lengths:
    """Bounds in tokens: from the statement to the question, and of the whole prompt."""

    nearest: int = 2000
    farthest: int = 3900
    prompt: int = 4096 - 64


class Filler:
    """Paragraphs between the statement and the question: passages of real text and generated sentences."""

    def __init__(self, count_tokens: Callable[[str], int], passages: Sequence[str], generated: float = 0.3) -> None:
        """`generated` is the share of paragraphs made of generated sentences; all of them, if there are no passages."""
        self._count_tokens = count_tokens
        self._pieces = [piece for passage in passages for piece in short_pieces(passage)]
        self._lengths: dict[str, int] = {}
        self._generated = generated if self._pieces else 1.0

    def take(self, rng: random.Random, tokens: int) -> tuple[list[str], int]:
        """Paragraphs of at most `tokens` tokens in all, and of at least SENTENCE less; with their length."""
        taken: list[str] = []
        total = 0
        at = rng.randrange(len(self._pieces)) if self._pieces else 0
        while total < tokens:
            if rng.random() < self._generated:
                piece = " ".join(plain_sentence(rng) for _ in range(rng.randint(1, 5)))
            else:
                piece = self._pieces[at % len(self._pieces)]
                at += 1
            if total + self.length(piece) + BREAK > tokens:
                piece = plain_sentence(rng)
            if total + self.length(piece) + BREAK > tokens:
                break
            taken.append(piece)
            total += self.length(piece) + BREAK
        return taken, total

    def length(self, piece: str) -> int:
        """The number of tokens of a piece of text on its own; remembered."""
        known = self._lengths.get(piece)
        if known is None:
            known = self._count_tokens(piece)
            if len(self._lengths) < 200_000:
                self._lengths[piece] = known
        return known


def short_pieces(passage: str) -> list[str]:
    """Cut a passage into paragraphs, and long paragraphs at ends of sentences."""
    pieces: list[str] = []
    for paragraph in passage.split("\n\n"):
        piece = ""
        for sentence in paragraph.strip().replace(". ", ".\0").split("\0"):
            if piece and len(piece) + len(sentence) > LONGEST_PIECE:
                pieces.append(piece)
                piece = ""
            piece = f"{piece} {sentence}" if piece else sentence
        if 40 < len(piece) < 2 * LONGEST_PIECE:
            pieces.append(piece)
    return pieces


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def make_passkey(rng: random.Random, split: Split, filler: Filler, lengths: Lengths) -> Sample:
    """A passkey of five digits (four to six in training), stated before and after filler text, then asked for."""
    key = _digits(rng, 5 if split is Split.EVAL else rng.choice((4, 5, 5, 5, 6)))
    room = lengths.prompt - OVERHEAD
    high = min(lengths.farthest, room)
    distance = rng.randint(min(lengths.nearest + SENTENCE, high), high)
    after, used = filler.take(rng, distance)
    before, _ = filler.take(rng, rng.randint(0, room - used))
    statement = rng.choice(STATEMENTS).format(key=key)
    pieces = [rng.choice(OPENINGS), *before, statement, *after, rng.choice(QUESTIONS)]
    text = "\n\n".join(piece for piece in pieces if piece)
    return Sample("passkey", [user(text)], False, f"The passkey is {key}.", key)


def make_multikey(rng: random.Random, filler: Filler, prompt_tokens: int) -> Sample:
    """Several named codes strewn over filler text, asked for one by one in later turns; for training only.

    The whole chat, answers included, has at most `prompt_tokens` tokens.
    """
    # Dense rows teach recall soonest: few of a step's tokens are codes, and fewer are out of the window's reach.
    count = max(2, min(24, prompt_tokens // rng.choice((56, 72, 104, 160))))
    names = rng.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], count)
    codes = {name: _digits(rng, rng.randint(3, 6)) for name in names}
    statements = [f"The code of the {name} is {code}." for name, code in codes.items()]
    asked = rng.sample(names, count)
    turn = 2 * filler.length(statements[0]) + 12
    paragraphs, _ = filler.take(
        rng, max(0, prompt_tokens - OVERHEAD - count * (turn + filler.length(statements[0]) + 4))
    )
    for statement in statements:
        paragraphs.insert(rng.randint(0, len(paragraphs)), statement)
    messages = [user("\n\n".join([*paragraphs, f"What is the code of the {asked[0]}?"]))]
    for before, name in pairwise(asked):
        messages.append({"role": "assistant", "content": _code_answer(before, codes)})
        messages.append(user(f"What is the code of the {name}?"))
    return Sample("multikey", messages, False, _code_answer(asked[-1], codes), codes[asked[-1]])


def _code_answer(name: str, codes: dict[str, str]) -> str:
    return f"The code of the {name} is {codes[name]}."
