"""One generated exercise, its split, and the random streams that make it."""

import hashlib
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from PIL import Image


class Split(StrEnum):
    """Training and evaluation draw from disjoint random streams and from disjoint sets of operands and names."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True)
class Sample:
    """A chat that ends with a user's message, and what the assistant should say next.

    messages: OpenAI form; images stand in them as `{"type": "image", "image": PIL image}` parts, and in `images` in
    the same order. With `thinking`, `reasoning` comes before the answer. `expected` is what a checker compares with.
    """

    task: str
    messages: list[dict[str, Any]]
    thinking: bool
    answer: str
    expected: Any
    reasoning: str = ""
    images: tuple[Image.Image, ...] = ()


def stream(split: Split, *seed: int | str) -> random.Random:
    """The random stream of a split and a seed; no two splits or seeds share one."""
    return random.Random("/".join([split.value, *map(str, seed)]))


def belongs(key: str, split: Split, held_out_one_in: int = 10) -> bool:
    """Whether the thing named by `key` may occur in a split: a hash gives one key in ten to evaluation alone."""
    digest = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest())
    return (digest % held_out_one_in == 0) == (split is Split.EVAL)


def user(text: str) -> dict[str, Any]:
    """A user's message of plain text."""
    return {"role": "user", "content": text}
