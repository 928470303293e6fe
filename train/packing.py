"""Fixed-size training batches: rows of samples and text, made endlessly by any number of workers."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deepinfer.config.model import VisionConfig
from deepinfer.text.images import TEXT, plan_grid
from deepinfer.text.spellings import BOS, EOS, PAD
from deepinfer.text.tokenizer import Tokenizer
from train.batch import Batch, BatchBuilder
from train.digit_images import SIZES
from train.recall import Filler, Lengths
from train.rendering import Rendered, Renderer
from train.sample import Split, stream
from train.tasks import TaskMaker
from train.tokenised import Corpus, control_id


@dataclass(frozen=True)
class Mixture:
    """Shares of rows, and of samples within rows of short samples; each table is normalised.

    A row of `text` is one piece of corpus; `short` rows hold many samples; `passkey` and `multikey` rows begin with
    one long sample. What room a row has left is filled with corpus text, or with short samples after a long one.
    """

    rows: dict[str, float] = field(
        default_factory=lambda: {"text": 0.4, "short": 0.45, "multikey": 0.1, "passkey": 0.05}
    )
    samples: dict[str, float] = field(
        default_factory=lambda: {"add2": 0.24, "add3": 0.2, "json": 0.2, "image": 0.2, "general": 0.16}
    )


@dataclass(frozen=True)
class PackSettings:
    """All that a worker needs; small and picklable.

    tokens, rows: T and B of a batch. images: image slots of a batch; a batch never has more images. nearest: the least
    distance in tokens between a passkey and its question. filler_tokens: corpus text decoded by a worker for fillers.
    """

    corpus: Path
    tokenizer: Path
    vision: VisionConfig
    tokens: int = 1024
    rows: int = 64
    images: int = 128
    image_sizes: tuple[tuple[int, int], ...] = SIZES
    mixture: Mixture = field(default_factory=Mixture)
    prompt_weight: float = 0.1
    nearest: int = 50
    filler_tokens: int = 300_000


def batches(settings: PackSettings, seed: int, worker: int = 0) -> Iterator[Batch]:
    """Endless batches; every (seed, worker) has its own stream. See `train.batch.BatchBuilder` for their arrays."""
    packer = Packer(settings, stream(Split.TRAIN, "packing", seed, worker))
    while True:
        yield packer.batch()


class Packer:
    """Fills rows from one random stream. Owns that stream and the sample carried over to the next row."""

    def __init__(self, settings: PackSettings, rng: random.Random) -> None:
        tokenizer = Tokenizer.from_file(settings.tokenizer)
        self._settings = settings
        self._rng = rng
        self._corpus = Corpus(settings.corpus, tokenizer)
        self._renderer = Renderer(tokenizer, settings.vision, settings.prompt_weight)
        filler = Filler(lambda text: len(tokenizer.encode(text)), self._corpus.passages(rng, settings.filler_tokens))
        prompt = settings.tokens - 24
        lengths = Lengths(settings.nearest, prompt, prompt)
        self._maker = TaskMaker(Split.TRAIN, filler, lengths, settings.image_sizes)
        self._bos, self._eos, self._pad = (control_id(tokenizer, spelling) for spelling in (BOS, EOS, PAD))
        self._carried: Rendered | None = None
        self._grids = [plan_grid(width, height, settings.vision) for width, height in settings.image_sizes]

    def batch(self) -> Batch:
        """One batch of `rows` rows of `tokens` tokens."""
        settings = self._settings
        builder = BatchBuilder(
            settings.rows,
            settings.tokens,
            settings.images,
            self._bos,
            self._pad,
            self._grids,
            settings.vision.patch_size,
        )
        for row in range(settings.rows):
            for sequence in self._row(settings.images - builder.images_used):
                builder.append(row, sequence)
        return builder.finish()

    def _row(self, image_slots: int) -> list[Rendered]:
        kind = _draw(self._rng, self._settings.mixture.rows)
        if kind == "text":
            return [self._text(self._settings.tokens)]
        if kind == "short":
            sequences, left = self._short_samples(self._settings.tokens, image_slots)
            at = self._rng.randint(0, len(sequences))
            return [*sequences[:at], *self._rest(left), *sequences[at:]]
        first = self._long_sample(kind)
        sequences, left = self._short_samples(self._settings.tokens - _padded(first), image_slots)
        return [first, *sequences, *self._rest(left)]

    def _long_sample(self, kind: str) -> Rendered:
        while True:
            rendered = self._renderer.render(self._maker.make(kind, self._rng))
            if _padded(rendered) <= self._settings.tokens:
                return rendered

    def _short_samples(self, room: int, image_slots: int) -> tuple[list[Rendered], int]:
        """Samples until one does not fit, which is kept for the next row; and the room left."""
        taken: list[Rendered] = []
        while True:
            sample = self._carried
            if sample is None or len(sample.images) > image_slots:
                sample = self._short_sample(image_slots)
            else:
                self._carried = None
            if _padded(sample) > room:
                self._carried = sample
                return taken, room
            taken.append(sample)
            room -= _padded(sample)
            image_slots -= len(sample.images)

    def _short_sample(self, image_slots: int) -> Rendered:
        shares = self._settings.mixture.samples
        if not image_slots:
            shares = {task: share for task, share in shares.items() if task != "image"}
        return self._renderer.render(self._maker.make(_draw(self._rng, shares), self._rng))

    def _rest(self, room: int) -> list[Rendered]:
        return [self._text(room)] if room >= 16 else []

    def _text(self, length: int) -> Rendered:
        ids = self._corpus.piece(self._rng, length)
        weight = np.ones(length, np.float32)
        weight[0] = 0
        # After the end of a document the next one begins: BOS is never to be predicted.
        weight[1:][ids[:-1] == self._eos] = 0
        return Rendered(ids, weight, np.full(length, TEXT, np.int8))


def _padded(sequence: Rendered) -> int:
    return len(sequence.ids) + len(sequence.ids) % 2


def _draw(rng: random.Random, shares: dict[str, float]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]
