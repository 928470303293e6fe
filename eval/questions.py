"""Held-out exercises, rendered as the model will read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError
from deepinfer.text.images import ImageInput
from deepinfer.text.tokenizer import Tokenizer
from train.recall import Filler, Lengths
from train.rendering import Renderer
from train.sample import Sample, Split, stream
from train.tasks import EVALUATED, TaskMaker

HELDOUT = Path(__file__).with_name("heldout.txt")
SEPARATOR = "\n\f\n"
COUNTS = dict.fromkeys(EVALUATED, 200) | {"passkey": 40}
"""Exercises of each task where nobody asks for another number."""
REPLY_ROOM = 64


@dataclass(frozen=True)
class Question:
    """An exercise with its prompt and the reply that would be right.

    prompt: token ids, image tokens included. types: a kind for each of them, -1 for text. expected: the ids of the
    right reply from the reasoning, if any, to the end token.
    """

    sample: Sample
    prompt: tuple[int, ...]
    types: tuple[int, ...]
    images: tuple[ImageInput, ...]
    expected: tuple[int, ...]

    @property
    def most_tokens(self) -> int:
        """What a reply may have; one that is right has `len(expected)`."""
        return len(self.expected) + 32


def heldout_documents() -> list[str]:
    """The documents of `heldout.txt`: English prose of which no paragraph stands in the training text."""
    return HELDOUT.read_text("utf-8").split(SEPARATOR)


class QuestionMaker:
    """Makes the exercises of one checkpoint's vocabulary and vision settings."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._renderer = Renderer(tokenizer, config.vision, prompt_weight=0)
        self._filler = Filler(lambda text: len(tokenizer.encode(text)), heldout_documents())

    def make(self, counts: Mapping[str, int], purpose: str, seed: int) -> list[Question]:
        """`counts[task]` exercises of each task; other purposes or seeds give other ones.

        ConfigError if the model cannot be asked: a passkey needs the context for it, an image a vision tower.
        """
        maker = TaskMaker(Split.EVAL, self._filler, self._lengths(counts))
        if counts.get("image") and self._config.vision is None:
            raise ConfigError("this checkpoint has no vision tower; leave the task image out")
        made = []
        for task, count in counts.items():
            rng = stream(Split.EVAL, purpose, seed, task)
            made += [self._question(maker.make(task, rng)) for _ in range(count)]
        return made

    def _lengths(self, counts: Mapping[str, int]) -> Lengths:
        lengths = Lengths()
        context = self._config.max_position_embeddings
        if counts.get("passkey") and lengths.prompt + REPLY_ROOM > context:
            raise ConfigError(
                f"passkeys need a context of {lengths.prompt + REPLY_ROOM} tokens and this checkpoint has {context}; "
                "leave the task passkey out"
            )
        return lengths

    def _question(self, sample: Sample) -> Question:
        rendered = self._renderer.render(sample)
        length = int(np.flatnonzero(rendered.target_weight)[0])  # only the reply has weight
        ids = tuple(int(token) for token in rendered.ids)
        types = tuple(int(kind) for kind in rendered.types[:length])
        return Question(sample, ids[:length], types, rendered.images, ids[length:])
