"""The spellings of the V4.1 chat protocol that a vocabulary must hold as added tokens."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Spelling:
    """One added token of `tokenizer.json`: its text and its two flags there.

    `special` decides whether `Tokenizer.decode` drops the token by default; `normalized` whether the `tokenizers`
    package looks for it after the normalizer ran. Both are as in the published V4.1 file; the prompt encoder and
    the parser work with any flags.
    """

    text: str
    special: bool
    normalized: bool


BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
IMAGE = "<｜deepseek_image｜>"

# In the published order; the first three have ids 0, 1 and 2 there. DSML marks tool calls, IMAGE is every token of
# an image span, LATEST_REMINDER opens a reminder message. SYSTEM doubles as the drafter's mask token in the release.
PROTOCOL_SPELLINGS: tuple[Spelling, ...] = (
    Spelling(BOS, special=True, normalized=False),
    Spelling(EOS, special=True, normalized=False),
    Spelling(PAD, special=True, normalized=False),
    Spelling(SYSTEM, special=False, normalized=True),
    Spelling(USER, special=False, normalized=True),
    Spelling(ASSISTANT, special=False, normalized=True),
    Spelling(THINK, special=False, normalized=True),
    Spelling(END_THINK, special=False, normalized=True),
    Spelling(DSML, special=False, normalized=True),
    Spelling(LATEST_REMINDER, special=False, normalized=True),
    Spelling(IMAGE, special=False, normalized=False),
)
