"""DeepSeek-V4.1-Flash as plain PyTorch: the whole sequence at once, without caches. The oracle of every test."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from deepinfer.config.model import ModelConfig
from deepinfer.reference.attention import Rows, SharedKV
from deepinfer.reference.block import Block
from deepinfer.reference.draft import Draft, DraftStage, draft_context, draft_hidden, finish_greedily
from deepinfer.reference.engram import Memory, lookback
from deepinfer.reference.hyper import collapse
from deepinfer.reference.indexer import Ties
from deepinfer.reference.norm import Linear, RMSNorm
from deepinfer.reference.vision import Aligner, VisionTower
from deepinfer.text.images import END, IMAGE, NEWLINE, START, TEXT, ImageInput


@dataclass
class Trace:
    """Intermediate values of one forward pass, for comparison with an oracle."""

    streams: list[Tensor] = field(default_factory=list)  # into each layer, before its Engram
    attention: list[Tensor] = field(default_factory=list)  # output of each layer's attention
    shared: dict[int, SharedKV] = field(default_factory=dict)  # by KV-source layer
    selected: dict[int, Tensor] = field(default_factory=dict)  # by index-source layer

    def record(self, layer: int, config: ModelConfig, shared: SharedKV | None, attention: Tensor) -> None:
        """Keep what ``layer`` produced."""
        self.attention.append(attention)
        if shared is None:
            return
        if layer in config.kv_source_layer_ids:
            self.shared[layer] = shared
        if layer in config.index_source_layer_ids and shared.selection is not None:
            self.selected[layer] = shared.selection.selected


@dataclass(frozen=True)
class ForwardOutput:
    """``logits`` FP32 [B, R, vocab], ``hidden`` [B, R, H] after the final norm, ``features`` [B, R, F] for drafting.

    R counts the rows that the decoder half ran, ``first`` is the position of the first of them.
    """

    hidden: Tensor
    features: Tensor
    logits: Tensor
    first: int


class ReferenceModel(nn.Module):
    """Parameters carry checkpoint names, except that experts are stacked and ``hc_*`` tensors sit in modules."""

    def __init__(self, config: ModelConfig, classes: Sequence[int] | None = None, ties: Ties = Ties.LOWEST) -> None:
        """``classes`` maps token ids to Engram's compressed ids; needed where the config has Engram layers."""
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, hidden)
        blocks = (
            Block(config, layer, config.n_routed_experts, config.num_experts_per_tok)
            for layer in range(config.num_hidden_layers)
        )
        self.layers = cast(Sequence[Block], nn.ModuleList(blocks))
        for layer in self.layers:
            layer.attn.ties = ties
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = Linear(hidden, config.vocab_size)
        stages = (DraftStage(config, stage) for stage in range(config.draft_stages))
        self.mtp = cast(Sequence[DraftStage], nn.ModuleList(stages))
        if config.vision is not None:
            self.vision, self.aligner = VisionTower(config.vision), Aligner(config.vision, hidden)
            self.image_start, self.image_end, self.image_newline = (nn.Parameter(torch.zeros(hidden)) for _ in range(3))
        known = list(classes if classes is not None else range(config.vocab_size))
        self.pad_class = known[config.engram_pad_token_id] if config.engram_layer_ids else 0
        self.register_buffer("classes", torch.tensor(known), persistent=False)
        self.classes: Tensor

    def embed_images(self, images: Sequence[ImageInput]) -> Tensor:
        """Token embeddings of all images, one after the other: [sum of merged cells, H]."""
        outputs = []
        for image in images:
            rows, cols = image.grid.vit_rows, image.grid.vit_cols
            patches = image.patches[None].to(self.embed.weight.device, self.embed.weight.dtype)
            outputs.append(self.aligner(self.vision(patches, rows, cols), rows, cols)[0])
        return torch.cat(outputs)

    def embed_tokens(self, ids: Tensor, types: Tensor | None, cells: Tensor | None) -> Tensor:
        """Embeddings [B, T, H]; image cells [M, H] go, in order, to the tokens of type IMAGE."""
        x = self.embed(ids)
        if types is None or self.config.vision is None:
            return x
        for kind, vector in ((START, self.image_start), (NEWLINE, self.image_newline), (END, self.image_end)):
            x = torch.where((types == kind)[..., None], vector.to(x.dtype), x)
        if cells is not None:
            is_cell = types == IMAGE
            order = (is_cell.flatten().cumsum(0) - 1).clamp(0, len(cells) - 1).view_as(is_cell)
            x = torch.where(is_cell[..., None], cells[order].to(x.dtype), x)
        return x

    def forward(
        self,
        ids: Tensor,
        types: Tensor | None = None,
        images: Sequence[ImageInput] | None = None,
        replay_start: Tensor | None = None,
        compact: bool = False,
        trace: Trace | None = None,
    ) -> ForwardOutput:
        """Run the model over right-padded sequences.

        ``ids`` int64 [B, T]; ``types`` int8 [B, T] (-1 text, 0 start, 1 image, 2 newline, 3 end of an image);
        ``images`` in the order of their spans, sequence by sequence. ``replay_start`` int64 [B] is the position from
        which the decoder half is valid (bounded replay); with ``compact`` the decoder half runs only the rows from the
        smallest of them on, else all rows run and the decoder's windows are masked at the cut.
        """
        cells = self.embed_images(images) if images else None
        x = self.embed_tokens(ids, types, cells)
        is_image = torch.zeros_like(ids, dtype=torch.bool) if types is None else types != TEXT
        return self.run_layers(x, ids, is_image, replay_start, compact, trace)

    def run_layers(
        self, x: Tensor, ids: Tensor, is_image: Tensor, replay_start: Tensor | None, compact: bool, trace: Trace | None
    ) -> ForwardOutput:
        """From embeddings [B, T, H] to logits; the other arguments as for `forward`."""
        config = self.config
        memory = Memory(lookback(self.classes[ids], ~is_image, config.engram_max_ngram_size, self.pad_class), ~is_image)
        rows = Rows(0, torch.arange(ids.shape[1], device=ids.device), is_image)
        x = x[..., None, :].expand(*x.shape[:-1], config.hc_mult, x.shape[-1])
        p = torch.zeros(x.shape[:-1], device=x.device)
        p[..., 0] = 1
        shared: SharedKV | None = None
        features: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if trace is not None:
                trace.streams.append(x)
            x = layer.remember(x, memory)
            h = layer.attention_input(x, p)
            if index in config.kv_source_layer_ids:
                shared = layer.attn.compress(h)
            if index == config.decoder_start and replay_start is not None:
                first = int(replay_start.min()) if compact else 0
                rows, memory = rows.after(first, replay_start), memory.after(first)
                x, p, h = x[:, first:], p[:, first:], h[:, first:]
            if index in config.dspark_target_layer_ids:
                features.append(x.float().mean(2))
            x, p, y = layer(x, h, rows, shared if config.ratio(index) else None)
            if trace is not None:
                trace.record(index, config, shared, y)
        hidden = self.norm(collapse(x, p))
        found = [feature[:, -hidden.shape[1] :] for feature in features]
        joined = torch.cat(found, dim=-1).to(hidden.dtype) if found else hidden[..., :0]
        return ForwardOutput(hidden, joined, self.logits(hidden), rows.first)

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits [..., vocab] of final-normed hidden states [..., H]."""
        return nn.functional.linear(hidden.float(), self.head.weight.float())

    def draft(self, ids: Tensor, features: Tensor, anchors: Tensor, first: int = 0) -> Draft:
        """Greedy blocks for the anchors of one sequence.

        ``ids`` int64 [T]; ``features`` [R, F] of the tokens from position ``first`` on, as `forward` gives them (tokens
        before are hidden from the drafter); ``anchors`` int64 [N] are positions of anchor tokens (the feature of an
        anchor itself is not read).
        """
        config, window = self.config, self.config.sliding_window
        known = first + torch.arange(features.shape[0], device=ids.device)
        contexts = draft_context(self.mtp, features[None], known)
        before = anchors[:, None] - torch.arange(window, 0, -1, device=ids.device)
        rows = (before - first).clamp(0, max(features.shape[0] - 1, 0))
        windows = [keys[0][rows] for keys in contexts]
        at = anchors[:, None] + torch.arange(config.dspark_block_size, device=ids.device)
        inputs = torch.full_like(at, config.dspark_noise_token_id)
        inputs[:, 0] = ids[anchors]
        embedded = self.embed(inputs).to(features.dtype)
        x = draft_hidden(self.mtp, embedded, windows, before >= first, at, config.hc_mult)
        last = self.mtp[-1]
        return finish_greedily(last, x, self.logits(last.norm(x)), ids[anchors])
