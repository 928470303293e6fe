"""Engram: an n-gram memory that is looked up by hashes of token ids and gated into the residual streams."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from deepinfer.config.model import ModelConfig
from deepinfer.reference.norm import Linear


def primes_from(start: int, count: int) -> list[int]:
    """The first ``count`` primes that are at least ``start``."""
    found: list[int] = []
    low = max(start, 2)
    while len(found) < count:
        high = low + max(64, 32 * count)
        composite = np.zeros(high - low, dtype=bool)
        for divisor in range(2, math.isqrt(high) + 1):
            composite[max(divisor * divisor, -(-low // divisor) * divisor) - low :: divisor] = True
        found += [low + int(i) for i in np.flatnonzero(~composite)]
        low = high
    return found[:count]


@dataclass(frozen=True)
class EngramHashing:
    """Constants of the hash of every Engram layer; a row id is ``hash mod prime + offset``.

    One ascending run of primes is handed out layer by layer, n-gram size by size (2, 3, ...), head by head.
    """

    primes: np.ndarray  # int64 [layers, sizes * heads]
    offsets: np.ndarray  # int64 [layers, sizes * heads]
    multipliers: np.ndarray  # int64 [layers, longest n-gram], for shifts 0, 1, ...
    heads: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> "EngramHashing":
        """Derive all constants from the config."""
        layers, sizes = len(config.engram_layer_ids), config.engram_max_ngram_size - 1
        columns = sizes * config.engram_n_heads
        primes = np.array(primes_from(config.engram_vocab_size, layers * columns), dtype=np.int64)
        primes = primes.reshape(layers, columns)
        bound = max(1, (np.iinfo(np.int64).max // config.engram_compressed_vocab_size) // 2)
        multipliers = [
            np.random.default_rng(10007 * layer).integers(0, bound, size=sizes + 1, dtype=np.int64) * 2 + 1
            for layer in config.engram_layer_ids
        ]
        offsets = np.cumsum(primes, axis=1) - primes
        return cls(primes, offsets, np.array(multipliers).reshape(layers, sizes + 1), config.engram_n_heads)


def lookback(classes: Tensor, is_text: Tensor, size: int, pad: int) -> list[Tensor]:
    """Compressed ids of the token 0, 1, ..., size - 1 places back, each int64 [B, T].

    ``classes`` int64 [B, T] are compressed ids, ``is_text`` bool [B, T]. Once a lookback reaches an image token or
    passes the sequence start, it and every longer one give ``pad``.
    """
    found, alive = [], torch.ones_like(is_text)
    for back in range(size):
        shifted = nn.functional.pad(classes, (back, 0))[:, : classes.shape[1]]
        alive = alive & nn.functional.pad(is_text, (back, 0))[:, : classes.shape[1]]
        found.append(torch.where(alive, shifted, pad))
    return found


def row_ids(back: Sequence[Tensor], primes: Tensor, offsets: Tensor, multipliers: Tensor, heads: int) -> Tensor:
    """Table rows of one layer: lookback ids, each [B, T] -> int64 [B, T, sizes * heads], size-major, head-minor."""
    mixed, columns = back[0] * multipliers[0], []
    for shift in range(1, len(back)):
        mixed = mixed ^ (back[shift] * multipliers[shift])
        columns.append(mixed[..., None].expand(*mixed.shape, heads))
    return torch.cat(columns, dim=-1).remainder(primes) + offsets


@dataclass(frozen=True)
class Memory:
    """What every Engram layer looks up with: the same for all layers of one forward pass."""

    back: Sequence[Tensor]  # from `lookback`, each int64 [B, T]
    is_text: Tensor  # bool [B, T]

    def after(self, start: int) -> "Memory":
        """The same without the first ``start`` positions."""
        return Memory([ids[:, start:] for ids in self.back], self.is_text[:, start:])


class Engram(nn.Module):
    """One Engram layer: table, projection and gate."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        index = config.engram_layer_ids.index(layer)
        streams, hidden = config.hc_mult, config.hidden_size
        hashing = EngramHashing.from_config(config)
        columns = hashing.primes.shape[1]
        self.embed = nn.Embedding(config.engram_num_embeddings[index], config.engram_head_dim)
        self.wkv = Linear(columns * config.engram_head_dim, (streams + 1) * hidden)
        self.q_weight = nn.Parameter(torch.ones(streams, hidden))
        self.k_weight = nn.Parameter(torch.ones(streams, hidden))
        self.eps, self.heads = config.rms_norm_eps, hashing.heads
        for name in ("primes", "offsets", "multipliers"):
            self.register_buffer(name, torch.from_numpy(getattr(hashing, name)[index]), persistent=False)
        self.primes: Tensor
        self.offsets: Tensor
        self.multipliers: Tensor

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Streams [B, T, S, H] -> streams; image tokens keep theirs."""
        rows = row_ids(memory.back, self.primes, self.offsets, self.multipliers, self.heads)
        kv = self.wkv(self.embed(rows).flatten(-2).to(x.dtype))
        k, v = kv.split((x.shape[-2] * x.shape[-1], x.shape[-1]), dim=-1)
        gate = self.gate(x, k.unflatten(-1, x.shape[-2:])) * memory.is_text[..., None]
        return (x.float() + gate[..., None] * v.float()[..., None, :]).to(x.dtype)

    def gate(self, x: Tensor, k: Tensor) -> Tensor:
        """Gate of each stream from the agreement of stream and memory key: [B, T, S, H] twice -> FP32 [B, T, S]."""
        x, k = x.float(), k.float()
        dot = (x * self.q_weight.float() * self.k_weight.float() * k).sum(-1)
        norms = (x.square().mean(-1) + self.eps).rsqrt() * (k.square().mean(-1) + self.eps).rsqrt()
        agreement = dot * norms * x.shape[-1] ** -0.5
        return (agreement.sign() * agreement.abs().clamp(min=1e-6).sqrt()).sigmoid()
