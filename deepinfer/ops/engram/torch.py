"""The PyTorch version: defines the operators, on any device."""

import torch
from torch import Tensor

from deepinfer.checkpoint.formats import dequantize_fp8_rows
from deepinfer.ops.engram.hashing import EngramHashing


def lookback(classes: Tensor, size: int, pad: int) -> Tensor:
    """classes int64 [G, size - 1 + n] -> int64 [G, n, size]: the token itself, then the one before it, and so on."""
    back = classes.unfold(1, size, 1).flip(-1)
    alive = (back >= 0).cumprod(-1).bool()
    return torch.where(alive, back, pad)


def recall(
    ids: Tensor, slots: Tensor, positions: Tensor, history: Tensor, classes: Tensor, size: int, pad: int
) -> tuple[Tensor, Tensor]:
    """ids, slots, positions int64 [N], history int64 [slots, ring], classes int64 [V] -> int64 [N, size], bool [N]."""
    own, ring = classes[ids], history.shape[1]
    earlier = positions[:, None] - torch.arange(1, size, device=ids.device)
    known = torch.where(earlier >= 0, classes[history[slots[:, None], earlier % ring]], -1)
    history[slots, positions % ring] = ids
    return lookback(torch.cat((known.flip(-1), own[:, None]), 1), size, pad)[:, 0], own >= 0


def row_ids(back: Tensor, hashing: EngramHashing, heads: int) -> Tensor:
    """back int64 [..., size] -> int64 [..., (size - 1) * heads]."""
    terms = back * hashing.multipliers
    mixed, sizes = terms[..., 0], []
    for shift in range(1, back.shape[-1]):
        mixed = mixed ^ terms[..., shift]
        sizes.append(mixed)
    return torch.stack(sizes, dim=-1).repeat_interleave(heads, dim=-1).remainder(hashing.primes) + hashing.offsets


def table_rows(codes: Tensor, scales: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """codes uint8 [T, C], scales uint8 [T, C / 32], ids int64 [A] -> [A, C] of `dtype`."""
    found, sizes = codes.index_select(0, ids), scales.index_select(0, ids)
    return dequantize_fp8_rows(found.view(torch.float8_e4m3fn), sizes.view(torch.float8_e8m0fnu)).to(dtype)


def remember(x: Tensor, kv: Tensor, qk: Tensor, is_text: Tensor, eps: float) -> Tensor:
    """x [N, S, H], kv [N, (S + 1) * H], qk FP32 [S, H], is_text bool [N] -> [N, S, H] in the dtype of x."""
    width = x.shape[1] * x.shape[2]
    streams, keys = x.float(), kv[:, :width].view_as(x).float()
    norms = (streams.square().mean(-1) + eps).rsqrt() * (keys.square().mean(-1) + eps).rsqrt()
    agreement = (streams * qk * keys).sum(-1) * norms * x.shape[2] ** -0.5
    gate = (agreement.sign() * agreement.abs().clamp(min=1e-6).sqrt()).sigmoid() * is_text[:, None]
    return torch.addcmul(streams, gate[:, :, None], kv[:, None, width:].float()).to(x.dtype)
