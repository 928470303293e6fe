"""Runs requests through an engine and keeps the logits that every token was drawn from."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.cache.budget import CacheSizes
from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import Environment
from deepinfer.config.model import ModelConfig
from deepinfer.core.plan import Plan
from deepinfer.core.request import TEXT, Request
from deepinfer.core.sampled import Sampled, SampledRow, TokenMasks
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.assembly import Parts, assemble
from deepinfer.engine.loop import run_ahead, run_plain
from deepinfer.engine.scheduler import Job

Drawn = dict[tuple[int, int], Tensor]
"""Logits FP32 [vocab] on the host, by request (its index) and position of the token drawn from them."""


class _Recorder:
    """Stands before a sampler and keeps what it is given."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.indices: dict[int, int] = {}
        self.drawn: Drawn = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def sample(self, logits: Tensor, rows: Sequence[SampledRow], masks: TokenMasks | None = None) -> Sampled:
        kept = logits.cpu().clone()
        for row, values in zip(rows, kept, strict=True):
            self.drawn.setdefault((self.indices[row.request_id], row.position), values)
        sampled: Sampled = self._sampler.sample(logits, rows, masks)
        return sampled


@dataclass(frozen=True)
class Setting:
    """How an engine is to run its requests: `EngineConfig`'s keywords, the order they come in, and how many later."""

    name: str
    keywords: dict[str, Any]
    order: tuple[int, ...]
    late: int = 0
    pages: int | None = None


class Engines:
    """Makes engines of one checkpoint and runs the same requests through them."""

    def __init__(self, directory: Path, environment: Environment, dtype: str) -> None:
        self._directory, self._dtype = directory, dtype
        self._environment = replace(environment, nextn=0)  # a draft that is not accepted has no place in a lone run
        self._config = ModelConfig.from_file(directory / "config.json")

    @property
    def vocabulary(self) -> int:
        """Ids below it are text: special tokens, the image marker among them, come last."""
        image = self._config.image_token_id
        return self._config.vocab_size if image is None else min(image, self._config.vocab_size)

    def run(self, requests: Sequence[Request], setting: Setting) -> tuple[Drawn, Parts]:
        """The logits of all tokens of the requests at the places `setting.order`."""
        parts = assemble(self._directory, self._environment, self._settings(setting))
        recorder = _Recorder(parts.runner.sampler)
        parts.runner.sampler = recorder  # type: ignore[assignment]
        waiting = [requests[place] for place in setting.order]

        def add(count: int) -> None:
            for request in waiting[:count]:
                request_id = parts.scheduler.add(request)
                recorder.indices[request_id] = request.index
                parts.runner.admit(request_id, request)
            del waiting[:count]

        def landed(plan: Plan, extended: Sequence[Job]) -> None:
            for job in extended:
                if job.error is not None:
                    raise job.error
            add(1)

        loop = run_ahead if setting.keywords.get("asynchronous", True) else run_plain
        add(len(waiting) - setting.late)
        loop(parts.scheduler, parts.runner, landed)
        return recorder.drawn, parts

    def _settings(self, setting: Setting) -> EngineConfig:
        settings = EngineConfig(dtype=self._dtype, **setting.keywords)
        if setting.pages is None:
            return settings
        sizes = CacheSizes(self._config, settings.max_num_seqs, settings.page_size)
        return replace(settings, cache_bytes=sizes.total(setting.pages))


def random_requests(vocabulary: int, count: int, longest: int, tokens: int, seed: int) -> list[Request]:
    """Prompts of random text, some with the same beginning; all sampled at temperature 1, with seeds of their own."""
    source = random.Random(seed)
    shared = [source.randrange(5, vocabulary) for _ in range(longest)]
    made = []
    for index in range(count):
        length = source.randint(1, longest)
        own = [source.randrange(5, vocabulary) for _ in range(length)]
        ids = tuple(own if index % 3 else shared[: length // 2] + own[length // 2 :])
        params = SamplingParams(temperature=1.0, max_tokens=source.randint(2, tokens), seq_seed=index, ignore_eos=True)
        made.append(Request(index, None, ids, (TEXT,) * length, (), params, index))
    return made


def random_settings(count: int, requests: Sequence[Request], page_size: int, seed: int) -> list[Setting]:
    """Ways to run the requests together: chunks, steps, room and pages of many sizes, any order, both loops."""
    source = random.Random(seed)
    longest = max(len(request.token_ids) + (request.params.max_tokens or 0) for request in requests)
    least = -(-longest // page_size) + 1
    made = []
    for number in range(count):
        slots = source.choice([2, 3, 8, 32])
        keywords = {
            "max_num_seqs": slots,
            "max_chunk": source.choice([None, 1 + source.randrange(9), 64]),
            "max_num_batched_tokens": source.choice([slots + 7, 100, 8192]),
            "asynchronous": bool(number % 2),
            "page_size": page_size,
        }
        order = tuple(source.sample(range(len(requests)), len(requests)))
        pages = source.choice([None, least, least + 3, 2 * least])
        made.append(Setting(f"round {number}", keywords, order, source.randrange(len(requests)), pages))
    return made


def difference(wanted: Tensor, found: Tensor) -> float:
    """0 if equal to the bit, else the largest difference (at least the smallest number)."""
    if torch.equal(wanted.view(torch.int32), found.view(torch.int32)):
        return 0.0
    return max(float((wanted - found).abs().max()), torch.finfo(torch.float32).tiny)
