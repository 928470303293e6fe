"""The exercises of the small checkpoint: how they are made for either split, and how a reply is checked."""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from train.arithmetic import make_add2, make_add3
from train.digit_images import SIZES, make_image
from train.extraction import make_json
from train.general import make_general
from train.recall import Filler, Lengths, make_multikey, make_passkey
from train.sample import Sample, Split, stream

__all__ = ["EVALUATED", "TRAINING_ONLY", "Sample", "Split", "TaskMaker", "check", "stream"]

EVALUATED = ("add2", "add3", "json", "passkey", "image")
TRAINING_ONLY = ("multikey", "general")
BOXED = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")
DIGITS = re.compile(r"\d+")


@dataclass
class TaskMaker:
    """Makes samples of one split.

    filler: text between a passkey and its question; may be None where no passkey is made. lengths: of passkey
    prompts, in tokens. image_sizes: (width, height) of the pictures drawn.
    """

    split: Split
    filler: Filler | None = None
    lengths: Lengths = field(default_factory=Lengths)
    image_sizes: Sequence[tuple[int, int]] = SIZES

    def make(self, task: str, rng: random.Random) -> Sample:
        """One sample of a task of EVALUATED or TRAINING_ONLY; ValueError for another, or for no filler."""
        if task in ("passkey", "multikey"):
            return self._recall(task, rng)
        if task == "image":
            return make_image(rng, self.split, tuple(self.image_sizes))
        if task == "general":
            return make_general(rng)
        make = _BY_SPLIT.get(task)
        if make is None:
            raise ValueError(f"unknown task {task!r}; expected one of {', '.join(EVALUATED + TRAINING_ONLY)}")
        return make(rng, self.split)

    def _recall(self, task: str, rng: random.Random) -> Sample:
        if self.filler is None:
            raise ValueError(f"task {task!r} needs a Filler")
        if task == "passkey":
            return make_passkey(rng, self.split, self.filler, self.lengths)
        return make_multikey(rng, self.filler, self.lengths.prompt)


_BY_SPLIT: dict[str, Callable[[random.Random, Split], Sample]] = {
    "add2": make_add2,
    "add3": make_add3,
    "json": make_json,
}


def check(sample: Sample, content: str) -> bool:
    """Whether a reply's content (reasoning left out) answers an evaluated sample.

    Arithmetic: exactly one value in `\\boxed{}`. JSON: the text parses, and keys, their order, values and types are
    those asked for. Passkey: the first run of digits. Image: the only run of digits.
    """
    return _CHECKS[sample.task](sample, content)


def _boxed(sample: Sample, content: str) -> bool:
    return [int(value) for value in BOXED.findall(content)] == [sample.expected]


def _json(sample: Sample, content: str) -> bool:
    try:
        found = json.loads(content)
    except ValueError:
        return False
    return isinstance(found, dict) and json.dumps(found) == json.dumps(sample.expected)


def _passkey(sample: Sample, content: str) -> bool:
    return DIGITS.findall(content)[:1] == [sample.expected]


def _image(sample: Sample, content: str) -> bool:
    return DIGITS.findall(content) == [sample.expected]


_CHECKS: dict[str, Callable[[Sample, str], bool]] = {
    "add2": _boxed,
    "add3": _boxed,
    "json": _json,
    "passkey": _passkey,
    "image": _image,
}
