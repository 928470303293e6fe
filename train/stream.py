"""Training batches as tensors, made by worker processes."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from deepinfer.config.model import VisionConfig
from train.canvas import Canvas
from train.loop import Inputs
from train.packing import Mixture, PackSettings, batches

STEP_TOKENS = 32_768
IMAGES = 144

SHORT = Mixture(
    rows={"text": 0.3, "short": 0.5, "multikey": 0.12, "passkey": 0.08},
    samples={"add2": 0.15, "add3": 0.13, "json": 0.14, "image": 0.42, "general": 0.16},
)
LONG = replace(SHORT, rows={"text": 0.2, "short": 0.3, "multikey": 0.25, "passkey": 0.25})
RECALL = Mixture(
    rows={"text": 0.12, "short": 0.3, "multikey": 0.33, "passkey": 0.25},
    samples={"add2": 0.2, "add3": 0.2, "json": 0.25, "image": 0.2, "general": 0.15},
)
REPLIES = Mixture(
    rows={"text": 0.1, "short": 0.6, "multikey": 0.15, "passkey": 0.15},
    samples={"add2": 0.25, "add3": 0.2, "json": 0.25, "image": 0.15, "general": 0.15},
)


def settings(data: Path, tokenizer: Path, vision: VisionConfig, tokens: int, mixture: Mixture) -> PackSettings:
    """Batches of STEP_TOKENS tokens in rows of ``tokens``."""
    rows = STEP_TOKENS // tokens
    return PackSettings(data / "corpus.bin", tokenizer, vision, tokens, rows, IMAGES, mixture=mixture)


class Stream(IterableDataset[Inputs]):
    """Batches of one shape; every worker has a random stream of its own.

    ids, types [B, T], loss_weight [B, T], what `Canvas.place` gives, and cut int64 [B]: in half of the rows, a random
    position at which decoder windows are cut, as bounded replay does.
    """

    def __init__(self, pack: PackSettings, seed: int) -> None:
        self._pack, self._seed = pack, seed

    def __iter__(self) -> Iterator[Inputs]:
        info = get_worker_info()
        worker = info.id if info else 0
        rng = random.Random(f"cut/{self._seed}/{worker}")
        canvas = Canvas(self._pack.image_sizes, self._pack.vision)
        for batch in batches(self._pack, self._seed, worker):
            cuts = [rng.randrange(self._pack.tokens) if rng.random() < 0.5 else 0 for _ in batch["ids"]]
            plain = {name: torch.from_numpy(batch[name]) for name in ("ids", "types", "loss_weight")}
            yield plain | canvas.place(batch) | {"cut": torch.tensor(cuts)}


def loader(pack: PackSettings, seed: int, workers: int, pin: bool) -> Iterator[Inputs]:
    """Endless batches, ``workers`` processes ahead (0: made in this process)."""
    prefetch = 4 if workers else None
    stream = Stream(pack, seed)
    return iter(DataLoader(stream, batch_size=None, num_workers=workers, pin_memory=pin, prefetch_factor=prefetch))
