"""Engram over caches: what a step's tokens look up in the n-gram memory, and the history that later steps need."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.checkpoint.formats import dequantize_fp8_rows
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch, Group
from deepinfer.model.weights import EngramWeights
from deepinfer.ops.cache_rows import load_rows
from deepinfer.ops.engram import lookback, remember, row_ids
from deepinfer.ops.linear import linear


@dataclass(frozen=True)
class Memory:
    """What every Engram layer of a step looks up with.

    back: int64 [N, longest n-gram], compressed ids of each token and those before it. is_text: bool [N].
    """

    back: Tensor
    is_text: Tensor

    def of(self, rows: Tensor) -> "Memory":
        """The same of some rows, int64 [M]."""
        return Memory(self.back[rows], self.is_text[rows])


def look_back(batch: Batch, history: Tensor, classes: Tensor, pad_class: int, config: ModelConfig) -> Memory:
    """The lookups of the step's rows.

    history: int64 [slots, ring] of token ids, the token of position p at p % ring; the step's own are added to it, in
    place. classes: int64 [vocab], compressed id of every token id, -1 of the image token, which stops a lookback.
    """
    size = config.engram_max_ngram_size
    if batch.recalled is not None:
        recalled = batch.recalled
        history[recalled.slots, recalled.positions % history.shape[1]] = recalled.ids
    own = classes[batch.ids]
    back = []
    for group in batch.encoder.groups:
        before = _before(group, history, classes, size - 1)
        back.append(lookback(torch.cat((before, group.view(own)), dim=1), size, pad_class).flatten(0, 1))
        _keep(group, history, group.view(batch.ids))
    return Memory(torch.cat(back) if back else own.new_empty(0, size), own >= 0)


def _before(group: Group, history: Tensor, classes: Tensor, count: int) -> Tensor:
    """Compressed ids int64 [G, count] of the tokens before each stretch, -1 for an image token and for none."""
    positions = group.firsts[:, None] + torch.arange(-count, 0, device=history.device)
    addresses = group.slots[:, None] * history.shape[1] + positions % history.shape[1]
    exists = positions >= 0
    ids = load_rows(history.view(-1, 1), addresses, exists)[..., 0]
    return classes[ids].masked_fill(~exists, -1)


def _keep(group: Group, history: Tensor, ids: Tensor) -> None:
    """Put the last tokens of each stretch, ids [G, n], into its slot's ring."""
    ring = history.shape[1]
    inside = torch.arange(max(0, group.count - ring), group.count, device=history.device)
    positions = group.firsts[:, None] + inside
    history[group.slots[:, None], positions % ring] = ids[:, inside]


def engram(x: Tensor, memory: Memory, weights: EngramWeights, config: ModelConfig) -> Tensor:
    """Add a layer's memory to the streams [M, S, H]; image tokens keep theirs."""
    rows = row_ids(memory.back, weights.hashing, config.engram_n_heads)
    codes = weights.codes.index_select(0, rows.flatten()).view(torch.float8_e4m3fn)
    scales = weights.scales.index_select(0, rows.flatten()).view(torch.float8_e8m0fnu)
    read = dequantize_fp8_rows(codes, scales).view(len(x), -1)
    kv = linear(read.to(x.dtype), weights.wkv)
    return remember(x, kv, weights.qk, memory.is_text, config.rms_norm_eps)
