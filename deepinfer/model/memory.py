"""Engram over caches: what a step's tokens look up in the n-gram memory, and the history that later steps need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.checkpoint.formats import dequantize_fp8_rows
from deepinfer.config.model import ModelConfig
from deepinfer.core.batch import Batch, Group
from deepinfer.model.weights import EngramWeights
from deepinfer.ops.cache_rows import load_rows
from deepinfer.ops.engram import lookback, recall, remember, row_ids, table_rows
from deepinfer.ops.linear import linear


class TableRows(NamedTuple):
    """Rows of an Engram table as stored: codes uint8 [A, C], scales uint8 [A, C / 32]."""

    codes: Tensor
    scales: Tensor


ReadTables = Callable[[Sequence[Tensor]], Sequence[TableRows]]
"""Reads tables that do not lie on the device, or not all of them: for each Engram layer rows int64 [A]."""


@dataclass(frozen=True)
class Memory:
    """What every Engram layer of a step looks up with.

    back: int64 [N, longest n-gram], compressed ids of each token and those before it. is_text: bool [N].
    fetched: by layer, what was read before the step's layers run: codes [N, lookups * C] and scales; empty: nothing.
    """

    back: Tensor
    is_text: Tensor
    fetched: Mapping[int, TableRows] = field(default_factory=dict)

    def of(self, pick: Callable[[Tensor], Tensor]) -> "Memory":
        """The same of other rows, which `pick` finds in a tensor of all."""
        fetched = {layer: TableRows(*map(pick, read)) for layer, read in self.fetched.items()}
        return Memory(pick(self.back), pick(self.is_text), fetched)


class HostTables:
    """Reads tables that lie in host memory, where the processes of a machine share the pages of the files."""

    def __init__(self, weights: Sequence[EngramWeights], device: torch.device) -> None:
        self._weights, self._device = weights, device

    def __call__(self, wanted: Sequence[Tensor]) -> list[TableRows]:
        """For each Engram layer, rows int64 [A] of its table -> what they hold, on the device."""
        read = []
        for layer, rows in zip(self._weights, wanted, strict=True):
            places = rows.to(layer.codes.device)
            parts = layer.codes.index_select(0, places), layer.scales.index_select(0, places)
            read.append(TableRows(*(part.to(self._device) for part in parts)))
        return read


def fetch(memory: Memory, layers: Mapping[int, EngramWeights], read: ReadTables, config: ModelConfig) -> Memory:
    """Read at once what all Engram layers will need for the rows of a step."""
    rows = [row_ids(memory.back, weights.hashing, config.engram_n_heads) for weights in layers.values()]
    found = read([part.flatten() for part in rows])
    count = len(memory.back)
    fetched = {
        layer: TableRows(*(part.view(count, -1) for part in read)) if count else read
        for layer, read in zip(layers, found, strict=True)
    }
    return replace(memory, fetched=fetched)


def look_back(batch: Batch, history: Tensor, classes: Tensor, pad_class: int, config: ModelConfig) -> Memory:
    """The lookups of the step's rows.

    history: int64 [slots, ring] of token ids, the token of position p at p % ring; the step's own are added to it, in
    place. classes: int64 [vocab], compressed id of every token id, -1 of the image token, which stops a lookback.
    """
    size = config.engram_max_ngram_size
    if batch.recalled is not None:
        recalled = batch.recalled
        history[recalled.slots, recalled.positions % history.shape[1]] = recalled.ids
    half = batch.encoder
    if half.groups and all(group.count == 1 for group in half.groups):
        return Memory(*recall(batch.ids, half.slots, half.positions, history, classes, size, pad_class))
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


def engram(x: Tensor, layer: int, memory: Memory, weights: EngramWeights, config: ModelConfig) -> Tensor:
    """Add a layer's memory to the streams [M, S, H]; image tokens keep theirs."""
    kv = linear(_read(layer, memory, weights, config, x.dtype).view(len(x), -1), weights.wkv)
    return remember(x, kv, weights.qk, memory.is_text, config.rms_norm_eps)


def _read(layer: int, memory: Memory, weights: EngramWeights, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """What the rows look up, [M * lookups, C]."""
    if not memory.fetched:
        ids = row_ids(memory.back, weights.hashing, config.engram_n_heads).flatten()
        return table_rows(weights.codes, weights.scales, ids, dtype)
    parts = zip(memory.fetched[layer], _widths(weights), strict=True)
    codes, scales = (part.view(-1, width) for part, width in parts)
    return dequantize_fp8_rows(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)).to(dtype)


def _widths(weights: EngramWeights) -> tuple[int, int]:
    return weights.codes.shape[1], weights.scales.shape[1]
