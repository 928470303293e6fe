"""What the end-to-end tests share: the reference as an oracle, sizes of small caches, a look at what is left behind."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from test_model_replay import simulate
from torch import Tensor

from deepinfer import LLM, RequestOutput
from deepinfer.cache.budget import CacheSizes
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config.model import ModelConfig
from deepinfer.engine.assembly import Parts
from deepinfer.reference.loading import load_reference
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.images import TEXT, ImageInput, image_types
from deepinfer.text.tokenizer import Tokenizer

AGREE = 0.98
"""Least share of right tokens: another order of summation may move a value over a rounding tie, rarely a token."""

_TIE = 0.05
"""A token is right if its logit is the best, or less than that many standard deviations below it."""


class Oracle:
    """The reference model of a checkpoint, which recomputes everything."""

    def __init__(self, directory: Path) -> None:
        self.model = load_reference(Checkpoint(directory), engram_classes(Tokenizer.from_file(directory)))
        self.config = self.model.config
        self.window = self.config.sliding_window

    @torch.inference_mode()
    def agreement(self, outputs: Sequence[RequestOutput], images: Sequence[ImageInput] = ()) -> float:
        """Share of greedy tokens that are the best ones after all tokens before them, with compact replay.

        `images`: those of the only output. What a cached prefix holds is taken to come from a cold run.
        """
        right = torch.cat([self._right(output, images) for output in outputs])
        return right.float().mean().item()

    def _right(self, output: RequestOutput, images: Sequence[ImageInput]) -> Tensor:
        """bool [T] of the generated tokens."""
        ids, made = list(output.prompt_token_ids), output.token_ids
        start, hit = max(0, len(ids) - self.window - 12), output.cached_tokens
        every = [*ids, *made[:-1]]
        types = self._types(every, images)
        if hit:
            rig, floor = SimpleNamespace(reference=self.model), max(0, min(hit, start) - self.window)
            first, logits = simulate(rig, every, hit, floor, start, True, types, images)
        else:
            rows = torch.tensor([every]), torch.tensor([types], dtype=torch.int8)
            cold = self.model(*rows, images, replay_start=torch.tensor([start]), compact=True)
            first, logits = cold.first, cold.logits[0]
        logits = logits[len(ids) - 1 - first :].clone()
        below = logits.std(-1) * _TIE
        logits[:, self.config.image_token_id] = -torch.inf
        return logits[torch.arange(len(made)), list(made)] >= logits.amax(-1) - below

    def _types(self, ids: Sequence[int], images: Sequence[ImageInput]) -> list[int]:
        kinds = iter([kind for image in images for kind in image_types(image.grid)])
        return [next(kinds) if token == self.config.image_token_id else TEXT for token in ids]


def texts(seed: int, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Random prompts of bytes, for the tiny model's vocabulary."""
    source = random.Random(seed)
    return [[source.randrange(256) for _ in range(source.randint(shortest, longest))] for _ in range(count)]


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def alike(one: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> float:
    """Share of outputs with the same tokens."""
    return sum(map(tuple.__eq__, tokens(one), tokens(other))) / len(one)


def caches_of(directory: Path, pages: int, slots: int = 32, page_size: int = 64) -> int:
    """The `cache_bytes` that make just so many pages."""
    config = ModelConfig.from_file(directory / "config.json")
    return CacheSizes(config, slots, page_size, 1 + config.dspark_block_size).total(pages)


def parts(llm: LLM) -> Parts:
    return llm._engine._parts


def check_at_rest(llm: LLM) -> None:
    """Nobody holds anything: all pages are free or cached, and nothing remembers a request."""
    inside = parts(llm)
    inside.kv.check_integrity()
    assert inside.kv.available_pages == inside.kv.total_pages
    assert not inside.scheduler.has_work()
    assert (inside.scheduler.num_waiting, inside.scheduler.num_running) == (0, 0)
    assert not inside.runner._requests
    assert not inside.runner._images
    statistics = inside.scheduler.statistics
    assert statistics.added == statistics.ended
