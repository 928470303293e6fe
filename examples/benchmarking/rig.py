"""A model, caches filled with plausible entries, and a runner, without requests of a user."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarking.group import OneOfGroup
from benchmarking.images import random_image, vision_of
from deepinfer.cache.storage import Caches
from deepinfer.checkpoint.locate import resolve_model
from deepinfer.checkpoint.random import RandomCheckpoint
from deepinfer.checkpoint.reader import CONFIG_FILE, Checkpoint
from deepinfer.config.envs import read_environment
from deepinfer.config.model import ModelConfig
from deepinfer.config.released import RELEASED, released_config
from deepinfer.core.errors import ConfigError
from deepinfer.core.plan import Encode, Span
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.assembly import recording_of
from deepinfer.engine.content import image_spans
from deepinfer.engine.device import select_device
from deepinfer.engine.model_runner import ModelRunner
from deepinfer.engine.replay import ReplayPolicy
from deepinfer.model.drafter import Drafter
from deepinfer.model.loading import load_drafter, load_weights
from deepinfer.model.model import InferenceModel
from deepinfer.model.row_operators import row_operators
from deepinfer.ops.engram import EngramHashing
from deepinfer.ops.kv_formats import pack_index, pack_latent, pack_window
from deepinfer.text.images import ImageInput, image_types

_FILLED_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Shape:
    """What is measured.

    model: "released" for the released model's shape, a checkpoint, or None for the default one. random: whether its
    weights are made up. ep_slice: one rank's share of a deployment over so many ranks: experts / ep_slice, and as many
    visits as rows of all ranks would bring it. picture: width and height of images that prompts show; None: text.
    engram_rows: most rows of a table. dtype: None for the device's own. graphs: whether decode steps are recorded,
    where the device can. nextn: most drafts that a step verifies behind a token; as many as the model has at most.
    extra_experts: redundant experts of the deployment, rounded up to a multiple of its ranks. cp: ranks of a group that
    shares prompts, of which one is measured.
    """

    model: str | None
    random: bool
    picture: tuple[int, int] | None = field(default=None, kw_only=True)
    ep_slice: int
    engram_rows: int
    page_size: int
    dtype: str | None = None
    graphs: bool = True
    nextn: int = field(default=0, kw_only=True)
    extra_experts: int = field(default=0, kw_only=True)
    cp: int = field(default=1, kw_only=True)


@dataclass(frozen=True)
class Rig:
    """Everything that steps run with. drafts: most that a step verifies behind a token."""

    config: ModelConfig
    model: InferenceModel
    caches: Caches
    runner: ModelRunner
    replay: int
    picture: tuple[int, int] | None = field(default=None, kw_only=True)
    drafts: int = field(default=0, kw_only=True)
    requests: dict[int, Request] = field(default_factory=dict, kw_only=True)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.model.device

    def admit(self, number: int, length: int, new: int = 0) -> Request:
        """A request of random ids in slot `number`, with pages of its own.

        If prompts show images, the last `new` tokens but one are as many images as there is room for, each another.
        """
        ids = torch.randint(5, self.config.vocab_size - 200, (length,), generator=torch.Generator().manual_seed(number))
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        types, images = self._images(number, new)
        ids[length - new :][torch.tensor(types, dtype=torch.int64) >= 0] = self.config.image_token_id or 0
        kinds = (*(-1,) * (length - new), *types)
        request = Request(number, None, tuple(ids.tolist()), kinds, images, params, 0)
        self.requests[number] = request
        self.runner.admit(number, request)
        return request

    def _images(self, number: int, room: int) -> tuple[tuple[int, ...], tuple[ImageInput, ...]]:
        """Types of `room` tokens, and the images among them."""
        types: list[int] = []
        images: list[ImageInput] = []
        while self.picture is not None:
            image = random_image(vision_of(self.config), *self.picture, seed=1000 * number + len(images))
            if len(types) + image.grid.tokens >= room:
                break
            images.append(image)
            types += image_types(image.grid)
        return (*types, *(-1,) * (room - len(types))), tuple(images)

    def encodes(self, spans: Sequence[Span]) -> tuple[Encode, ...]:
        """The images that begin in these rows, each to be encoded in one go."""
        found = []
        for span in spans:
            request = self.requests[span.request_id]
            for place, shown in enumerate(image_spans(request) if request.images else ()):
                if span.first <= shown.start < span.end:
                    blocks = vision_of(self.config).num_hidden_layers
                    found.append(Encode(shown.digest, span.request_id, place, 0, blocks, True))
        return tuple(found)

    def span(self, number: int, first: int, ids: tuple[int, ...] | None, floor: int, length: int, last: bool) -> Span:
        """The next rows of a request whose prompt has `length` tokens; `last`: they end it and give a token.

        ids: None for the newest token and the drafts behind it.
        """
        count = 1 + self.drafts if ids is None else len(ids)
        cut = max(floor, length - self.replay) if ids is not None else floor
        return Span(number, number, first, count, ids, first, floor, cut, cut, last)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def make_rig(shape: Shape, requests: int, tokens: int) -> Rig:
    """Load or make up the weights, and caches for `requests` requests of up to `tokens` tokens each."""
    environment = read_environment()
    device = select_device(environment.accelerator)
    checkpoint = _weights(shape, device)
    config = checkpoint.config
    if tokens > config.max_position_embeddings:
        raise ConfigError(f"{tokens} tokens are more than the model's context, {config.max_position_embeddings}")
    dtype = getattr(torch, shape.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    keep = shape.random or (device.type != "cpu" and dtype is torch.bfloat16)
    classes = [token % max(1, config.engram_compressed_vocab_size) for token in range(config.vocab_size)]
    weights = load_weights(checkpoint, dtype, device, keep)
    operators = row_operators(config, device) if keep else None
    model = InferenceModel(config, weights, classes, operators)
    each, drafts = (
        -(-tokens // shape.page_size),
        min(shape.nextn, config.dspark_block_size) if config.draft_stages else 0,
    )
    caches = Caches(config, requests * each, requests, shape.page_size, 1 + drafts, device)
    _fill(caches)
    order = torch.randperm(requests * each, generator=torch.Generator().manual_seed(0)).to(device)
    caches.page_table[:, :each] = order.view(requests, each)
    replay = ReplayPolicy.choose(environment, config)
    drafter = Drafter(config, load_drafter(checkpoint, dtype, device, keep), weights) if drafts else None
    recording = recording_of(model, operators, classes) if shape.graphs else None
    context: Any = OneOfGroup(model, caches, shape.cp) if shape.cp > 1 else None
    runner = ModelRunner(model, caches, config.vocab_size, drafter=drafter, recording=recording, context=context)
    return Rig(config, model, caches, runner, replay.keep, picture=shape.picture, drafts=drafts)


def _weights(shape: Shape, device: torch.device) -> Checkpoint | RandomCheckpoint:
    if shape.model == RELEASED:
        return RandomCheckpoint(sliced(released_config(), shape), device)
    directory = resolve_model(shape.model)
    if shape.random:
        return RandomCheckpoint(sliced(ModelConfig.from_file(Path(directory) / CONFIG_FILE), shape), device)
    if shape.ep_slice > 1:
        raise ConfigError("ep_slice takes random weights (--load_format random)")
    return Checkpoint(directory)


def sliced(config: ModelConfig, shape: Shape) -> ModelConfig:
    """One rank's share of the experts and smaller tables; without what is not measured: drafts, images in text."""
    ranks = shape.ep_slice
    if ranks % shape.cp and shape.cp > 1 and ranks > 1:
        raise ConfigError(f"cp is {shape.cp}; it must divide ep_slice, which is {ranks}")
    experts, rest = divmod(config.n_routed_experts, ranks)
    if rest or experts < config.num_experts_per_tok:
        raise ConfigError(f"ep_slice is {ranks}; it takes a divisor of {config.n_routed_experts} that leaves "
                          f"at least {config.num_experts_per_tok} experts")  # fmt: skip
    if ranks > 1:
        experts += -(-shape.extra_experts // ranks)
    drafting = max(config.dspark_num_experts_per_tok, -(-config.dspark_n_routed_experts // ranks))
    config = replace(config, n_routed_experts=experts, dspark_n_routed_experts=drafting)
    if not shape.nextn:
        ratios = config.compress_ratios[: config.num_hidden_layers]
        config = replace(config, num_nextn_predict_layers=0, compress_ratios=ratios)
    config = replace(config, vision=None if shape.picture is None else vision_of(config))
    if not config.engram_layer_ids or max(config.engram_num_embeddings) <= shape.engram_rows:
        return config
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    config = replace(config, engram_vocab_size=max(2, shape.engram_rows // columns))
    tables = EngramHashing.from_config(config)
    return replace(config, engram_num_embeddings=tuple(int(t.offsets[-1] + t.primes[-1]) for t in tables))


def _fill(caches: Caches) -> None:
    """Entries of Gaussian values: scores differ and windows are finite, as in use."""
    layout = caches.layout
    packers = [(caches.latents, pack_latent, layout.sources[0].latent * 16 // 9),
               (caches.index_keys, pack_index, layout.sources[0].index * 32 // 17),
               ([caches.windows, caches.drafts], pack_window, layout.window_row * 32 // 33)]  # fmt: skip
    generator = torch.Generator(caches.page_table.device).manual_seed(0)
    for tensors, pack, channels in packers:
        for tensor in tensors:
            rows = tensor.view(-1, tensor.shape[-1])
            if not len(rows):
                continue
            count = min(len(rows), _FILLED_AT_ONCE)
            packed = pack(torch.randn(count, channels, generator=generator, device=rows.device))
            for first in range(0, len(rows), count):
                rows[first : first + count] = packed[: len(rows) - first]
