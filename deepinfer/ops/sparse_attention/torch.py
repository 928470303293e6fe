"""The PyTorch version: defines the operator, on any device."""

import torch
from torch import Tensor

from deepinfer.ops.cache_rows import load_rows
from deepinfer.ops.kv_formats import unpack_latent, unpack_window

ROWS_CPU, ROWS = 64, 256
"""Rows of a stretch at a time: on a CPU what they gather should fit its cache, elsewhere fill the device."""


def sparse_attention(
    q: Tensor, near: Tensor, seen: Tensor, far: Tensor | None, chosen: Tensor | None, sink: Tensor
) -> Tensor:
    """q [G, n, h, D], near [G, P + n, D], seen [G, n], far [G, F, D], chosen [G, n, K], sink [h] -> [G, n, h, D]."""
    rows = q.shape[1]
    before = near.shape[1] - rows
    out = torch.empty_like(q)
    step = ROWS_CPU if q.device.type == "cpu" else ROWS
    for first in range(0, rows, step):
        last = min(first + step, rows)
        block = slice(first, last)
        picked, missing = None, None
        if far is not None and chosen is not None and chosen.shape[2] > 0:
            picked, missing = pick(far, chosen[:, block]), chosen[:, block] < 0
        out[:, block] = _attend(q[:, block], near[:, first : before + last], seen[:, block], picked, missing, sink)
    return out


def pick(far: Tensor, chosen: Tensor) -> Tensor:
    """far [G, F, D], chosen [G, n, K] -> [G, n, K, D]; place 0 for none."""
    starts = torch.arange(far.shape[0], device=far.device)[:, None, None] * far.shape[1]
    places = chosen.clamp(min=0) + starts
    return far.flatten(0, 1).index_select(0, places.flatten()).view(*chosen.shape, far.shape[2])


def _attend(
    q: Tensor, near: Tensor, seen: Tensor, picked: Tensor | None, missing: Tensor | None, sink: Tensor
) -> Tensor:
    stretches, rows, heads, dim = q.shape
    scale = dim**-0.5
    flat = q.flatten(1, 2)
    scores = torch.matmul(flat, near.transpose(1, 2)).view(stretches, rows, heads, -1).float() * scale
    parts = [scores.masked_fill_(~_in_window(seen, near.shape[1])[:, :, None], -torch.inf)]
    if picked is not None and missing is not None:
        distant = torch.matmul(q, picked.transpose(2, 3)).float() * scale
        parts.append(distant.masked_fill_(missing[:, :, None], -torch.inf))
    parts.append(sink[:, None].expand(stretches, rows, heads, 1))
    weights = torch.cat(parts, dim=-1).softmax(-1).to(q.dtype)
    width = near.shape[1]
    out = torch.matmul(weights[..., :width].flatten(1, 2), near).view_as(q)
    if picked is not None:
        out = out + torch.matmul(weights[..., width:-1], picked)
    return out


def _in_window(seen: Tensor, width: int) -> Tensor:
    """seen int64 [G, n] -> bool [G, n, width]: row i's own key is at width - n + i."""
    rows = seen.shape[1]
    own = torch.arange(width - rows, width, device=seen.device)
    distance = own[:, None] - torch.arange(width, device=seen.device)
    return (distance >= 0) & (distance < seen[:, :, None])


def attend_rows(
    q: Tensor, windows: Tensor, near: Tensor, latents: Tensor | None, chosen: Tensor | None, sink: Tensor
) -> Tensor:
    """q [M, h, D], windows uint8 [A, row], near [M, W], latents uint8 [B, row], chosen [M, K], sink [h] -> [M, h, D].

    Everything in FP32; places below 0 are none.
    """
    keys, exists = unpack_window(load_rows(windows, near.long(), near >= 0), torch.float32), near >= 0
    if latents is not None and chosen is not None:
        far = unpack_latent(load_rows(latents, chosen.long(), chosen >= 0), torch.float32)
        keys, exists = torch.cat((keys, far), 1), torch.cat((exists, chosen >= 0), 1)
    scores = torch.matmul(q.float(), keys.transpose(1, 2)) * q.shape[2] ** -0.5
    scores = scores.masked_fill(~exists[:, None], -torch.inf)
    weights = torch.cat((scores, sink[:, None].expand(*scores.shape[:2], 1)), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights, keys)
