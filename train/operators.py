"""The reference's small operators in a form that a compiler fuses, and what a training step collects from them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepinfer.reference import engram, experts, hyper, norm
from deepinfer.reference.experts import Router
from deepinfer.reference.indexer import Selection
from deepinfer.reference.rotary import rotate as rotate_reference
from deepinfer.reference.rounding import index_mxfp4, latent_nvfp4, window_fp8
from deepinfer.reference.vision import rotate_halves


@dataclass
class IndexRecord(Selection):
    """One index layer's scores and the attention mass of the layers that use them; `selected` is a mask here."""

    scores: Tensor = field(kw_only=True)  # FP32 [B, R, S], the only path of gradients into the indexer
    allowed: Tensor = field(kw_only=True)  # bool [B, R, S]
    mass: Tensor | None = None  # FP32 [B, R, S], summed over heads and layers, detached


@dataclass
class TrainingState:
    """What the operators leave for the training step; cleared by `begin`."""

    sparse: bool = False  # attend to the selected positions only, as in inference
    records: list[IndexRecord] = field(default_factory=list)
    loads: list[tuple[Router, Tensor]] = field(default_factory=list)  # rows per expert [2, E]: text, image tokens
    patch_mask: Tensor | None = None  # bool [N, P]: which places of the canvas hold a patch of their image

    def begin(self, sparse: bool) -> None:
        """Forget the last step."""
        self.sparse = sparse
        self.records.clear()
        self.loads.clear()


STATE = TrainingState()


def _mix_parts(
    projected: Tensor, inverse_rms: Tensor, base: Tensor, scale: Tensor, hc_eps: float, streams: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre and post coefficients, and the scores of comb, from fn's product [N, 2S + S*S] and 1 / rms [N, 1]."""
    weights = torch.cat([scale[i : i + 1].expand(n) for i, n in enumerate((streams, streams, streams * streams))])
    pre, post, comb = (base + projected * inverse_rms * weights).split((streams, streams, streams * streams), dim=-1)
    return pre.sigmoid() + hc_eps, 2 * post.sigmoid(), comb.unflatten(-1, (streams, streams))


def _inverse_rms(flat: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + eps)


def _collapse(x: Tensor, pre: Tensor) -> Tensor:
    return (x.float() * pre[..., None]).sum(-2).to(x.dtype)


def _expand(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    wide = x.float()
    carried = sum(comb[:, r, :, None] * wide[:, r, None, :] for r in range(x.shape[1]))
    return (post[..., None] * y.float()[:, None, :] + carried).to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm_reference(x, weight, eps)


norm_reference = norm.rms_norm


def _softmax(near: Tensor, far: Tensor | None, near_mask: Tensor, far_mask: Tensor | None, sink: Tensor) -> Tensor:
    """Weights bf16 [B, n, heads, W, 2W + S] of block-wise scores near [B, n, heads, W, 2W] and far [.., S]."""
    scores = near.float().masked_fill(~near_mask, -torch.inf)
    if far is not None and far_mask is not None:
        scores = torch.cat((scores, far.float().masked_fill(~far_mask, -torch.inf)), dim=-1)
    sinks = sink.float()[:, None, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    scores = (scores - top).exp()
    return (scores / (scores.sum(-1, keepdim=True) + (sinks - top).exp())).to(near.dtype)


def _index_loss(scores: Tensor, mass: Tensor, allowed: Tensor) -> Tensor:
    total = mass.sum(-1, keepdim=True)
    target = mass / total.clamp(min=1e-20)
    logs = scores.masked_fill(~allowed, -1e30).log_softmax(-1)
    rows = (total[..., 0] > 1e-4).float()
    return -((target * logs).sum(-1) * rows).sum() / rows.sum().clamp(min=1)


def _swiglu_weighted(gate: Tensor, up: Tensor, weights: Tensor, limit: float) -> Tensor:
    return (swiglu_reference(gate, up, limit) * weights[:, None]).to(gate.dtype)


swiglu_reference = experts.swiglu


def _rotate(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool) -> Tensor:
    return rotate_reference(x, positions, freqs, inverse)


def _grouped_mm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Products of consecutive row groups: x [M, C], weights [E, C, N], ends int32 [E] -> [M, N]."""
    return torch._grouped_mm(x, weights, offs=ends)


def _index_terms(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Index scores FP32 [B, R, S], one head at a time: the products of all heads never exist together."""
    total = None
    for head in range(q.shape[2]):
        term = ((q[:, :, head] @ keys.transpose(1, 2)).relu() * weights[:, :, head, None]).float()
        total = term if total is None else total + term
    assert total is not None
    return total


@dataclass
class Operators:
    """The functions above, plain or compiled."""

    grouped_mm: Callable[..., Any] = _grouped_mm

    mix_parts: Callable[..., Any] = _mix_parts
    inverse_rms: Callable[..., Any] = _inverse_rms
    sinkhorn: Callable[..., Any] = hyper.sinkhorn
    collapse: Callable[..., Any] = _collapse
    expand: Callable[..., Any] = _expand
    rms_norm: Callable[..., Any] = _rms_norm
    softmax: Callable[..., Any] = _softmax
    index_loss: Callable[..., Any] = _index_loss
    swiglu_weighted: Callable[..., Any] = _swiglu_weighted
    swiglu: Callable[..., Any] = swiglu_reference
    rotate: Callable[..., Any] = _rotate
    index_terms: Callable[..., Any] = _index_terms
    gate: Callable[..., Any] = engram.Engram.gate
    rotate_halves: Callable[..., Any] = rotate_halves
    window_fp8: Callable[..., Any] = window_fp8
    latent_nvfp4: Callable[..., Any] = latent_nvfp4
    index_mxfp4: Callable[..., Any] = index_mxfp4


OPS = Operators()
