"""Equivalents of the reference's hot operators that train fast on one GPU.

Same maths and signatures as in `deepinfer.reference`; the shapes are static and nothing waits for the host, so a whole
training step can be captured in a CUDA graph. Sparse attention becomes dense attention under a mask: a training step
needs every score anyway, since the indexer learns from the attention mass (`IndexRecord`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer.reference import attention, block, draft, engram, experts, hyper, indexer, model, norm
from deepinfer.reference.attention import Attention, Rows, SharedKV
from deepinfer.reference.experts import MixtureOfExperts, Router
from deepinfer.reference.hyper import Mix
from deepinfer.reference.indexer import Indexer, Selection
from deepinfer.reference.rotary import rotate as rotate_reference
from deepinfer.reference.rounding import index_mxfp4, latent_nvfp4, window_fp8
from deepinfer.reference.vision import VisionAttention, rotate_halves


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


def fast_coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm_eps: float, hc_eps: float, iterations: int
) -> Mix:
    """See `hyper.coefficients`."""
    flat = x.reshape(-1, x.shape[-2] * x.shape[-1])
    projected = nn.functional.linear(flat.float(), fn)
    pre, post, scores = OPS.mix_parts(projected, OPS.inverse_rms(flat, norm_eps), base, scale, hc_eps, x.shape[-2])
    mix = Mix(pre, post, OPS.sinkhorn(scores, iterations, hc_eps))
    return Mix(*(part.reshape(*x.shape[:-2], *part.shape[1:]) for part in mix))


def fast_collapse(x: Tensor, pre: Tensor) -> Tensor:
    """See `hyper.collapse`."""
    flat = OPS.collapse(x.reshape(-1, *x.shape[-2:]), pre.reshape(-1, pre.shape[-1]))
    return flat.view(*x.shape[:-2], x.shape[-1])


def fast_expand(y: Tensor, x: Tensor, mix: Mix) -> Tensor:
    """See `hyper.expand`."""
    streams = x.shape[-2]
    flat = OPS.expand(
        y.reshape(-1, y.shape[-1]),
        x.reshape(-1, *x.shape[-2:]),
        mix.post.reshape(-1, streams),
        mix.comb.reshape(-1, streams, streams),
    )
    return flat.view(x.shape)


def fast_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.rms_norm`."""
    return OPS.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def fast_rotate(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """See `rotary.rotate`."""
    return OPS.rotate(x, positions, freqs, inverse)


class Permute(torch.autograd.Function):
    """Rows of x [N, C] in another order, with the inverse order as the gradient's (an index's gradient would sort)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """x[order]."""
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """grad[inverse]."""
        return grads[0][ctx.saved_tensors[0]], None, None


def fast_routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float
) -> Tensor:
    """See `experts.routed_experts`: rows sorted by expert, one grouped product for each weight."""
    count, per_token = len(w1), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    sorted_experts = chosen.flatten()[order]
    ends = torch.searchsorted(sorted_experts, torch.arange(count, device=x.device), right=True).to(torch.int32)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    rows = Permute.apply(x[:, None].expand(-1, per_token, -1).reshape(-1, x.shape[1]), order, back)
    products = [OPS.grouped_mm(rows, w.to(x.dtype).transpose(1, 2), ends) for w in (w1, w3)]
    inner = OPS.swiglu_weighted(*products, weights.flatten()[order], limit)
    out = OPS.grouped_mm(inner, w2.to(x.dtype).transpose(1, 2), ends)
    return Permute.apply(out, back, order).view(len(x), per_token, -1).float().sum(1).to(x.dtype)


def fast_mixture(self: MixtureOfExperts, h: Tensor, is_image: Tensor) -> Tensor:
    """See `MixtureOfExperts.forward`; also counts each expert's rows, text and image tokens apart."""
    rows, images = h.flatten(0, -2), is_image.flatten()
    scores, bias = self.gate(rows, images)
    chosen, weights = experts.route(scores, bias, self.per_token, self.scaling, self.normalise)
    with torch.no_grad():
        hits = (chosen[..., None] == torch.arange(scores.shape[1], device=h.device)).any(1)
        load = torch.stack(((hits & ~images[:, None]).sum(0), (hits & images[:, None]).sum(0))).float()
    STATE.loads.append((self.gate, load))
    return self.experts(rows, chosen, weights).view_as(h) + self.shared_experts(h)


def near_mask(rows: Rows, window: int, batch: int) -> Tensor:
    """Block-wise window mask bool [B or 1, R / W, 1, W, 2W]: key k of a block lies at ``block * W - W + k``."""
    starts = rows.positions.view(-1, window)[:, :1, None]
    at = starts - window + torch.arange(2 * window, device=starts.device)
    query = rows.positions.view(-1, window)[:, :, None]
    mask = ((at <= query) & (at > query - window) & (at >= rows.first))[None]
    if rows.cut is not None:
        cut = rows.cut[:, None, None, None]
        mask = mask & ((at >= cut) | (query < cut))
    return mask[:, :, None]


def masked_attention(q: Tensor, kv: Tensor, shared: SharedKV | None, rows: Rows, sink: Tensor, window: int) -> Tensor:
    """See `attention.sparse_attention`; R must be a multiple of the window."""
    batch, count, heads, dim = q.shape
    blocks = count // window
    q = (q * dim**-0.5).view(batch, blocks, window, heads, dim).transpose(2, 3)
    keys = kv.view(batch, blocks, window, dim)
    keys = torch.cat((nn.functional.pad(keys, (0, 0, 0, 0, 1, 0))[:, :-1], keys), dim=2)
    near = q.flatten(2, 3) @ keys.transpose(2, 3)
    near = near.view(batch, blocks, heads, window, 2 * window)
    mask = near_mask(rows, window, batch)
    if shared is None:
        weights = OPS.softmax(near, None, mask, None, sink)
        out = weights.flatten(2, 3) @ keys
    else:
        record: Any = shared.selection
        far = q.reshape(batch, -1, dim) @ shared.latents.transpose(1, 2)
        far = far.view(batch, blocks, heads, window, -1)
        allowed = record.selected if STATE.sparse else record.allowed
        far_mask = allowed.view(batch, blocks, 1, window, -1)
        weights = OPS.softmax(near, far, mask, far_mask, sink)
        close, distant = weights.split((2 * window, far.shape[-1]), dim=-1)
        mass = distant.detach().sum(2, dtype=torch.float32).view(batch, count, -1)
        record.mass = mass if record.mass is None else record.mass + mass
        out = close.flatten(2, 3) @ keys
        out = out + (distant.reshape(batch, -1, far.shape[-1]) @ shared.latents).view_as(out)
    return out.view(batch, blocks, heads, window, dim).transpose(2, 3).reshape(batch, count, heads, dim)


def top_mask(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The ``count`` best allowed positions as a mask: FP32 and bool [.., S] -> bool [.., S]."""
    masked = scores.masked_fill(~allowed, -torch.inf)
    if count >= scores.shape[-1]:
        return allowed
    chosen = masked.topk(count, dim=-1, sorted=False).indices
    return torch.zeros_like(allowed).scatter_(-1, chosen, True) & allowed


def masked_select(self: Attention, h: Tensor, q_latent: Tensor, shared: SharedKV, rows: Rows) -> IndexRecord:
    """See `Attention.select`; gradients of the index loss stop at the indexer's inputs."""
    scores = self.indexer.scores(h.detach(), q_latent.detach(), shared.keys, rows.positions, self.freqs)
    allowed = self.allowed(shared, rows).contiguous()
    candidates = shared.selection.candidates if shared.selection is not None else None
    selected = allowed
    if STATE.sparse:
        with torch.no_grad():
            searched = allowed if candidates is None else allowed & candidates
            selected = top_mask(scores, searched, self.topk)
            if candidates is None and self.candidates is not None:
                candidates = indexer.candidate_positions(scores, allowed, *self.candidates, indexer.Ties.TOPK)
    record = IndexRecord(selected, candidates, scores=scores, allowed=allowed)
    STATE.records.append(record)
    return record


def detached_keys(self: Indexer, latent: Tensor, positions: Tensor, freqs: Tensor) -> Tensor:
    """See `Indexer.keys`; the latent itself learns from attention only."""
    return OPS.index_mxfp4(fast_rotate(self.k_norm(self.wk(latent.detach())), positions, freqs))


def index_loss() -> Tensor:
    """Mean over index layers of the cross-entropy between attention mass and index scores, in nats."""
    losses = []
    for record in STATE.records:
        assert record.mass is not None
        seen = record.selected if STATE.sparse else record.allowed
        losses.append(OPS.index_loss(record.scores, record.mass, seen))
    return torch.stack(losses).mean()


def canvas_attention(self: VisionAttention, x: Tensor, angles: Tensor) -> Tensor:
    """See `VisionAttention.forward`, for images of several grids on one canvas: patches see those of their image."""
    q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.wqkv(x).chunk(3, dim=-1))
    q, k = (OPS.rotate_halves(part, angles).transpose(1, 2) for part in (q, k))
    mask = None if STATE.patch_mask is None else STATE.patch_mask[:, None, None]
    mixed = nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=mask)
    return self.wo(mixed.transpose(1, 2).flatten(-2))


def install(compiled: bool) -> None:
    """Put the fast operators in the reference's place, for this process."""
    if compiled:
        torch._dynamo.config.recompile_limit = 64
        for name in Operators.__dataclass_fields__:
            setattr(OPS, name, torch.compile(getattr(OPS, name), dynamic=False))
        from train.sinkhorn import Sinkhorn

        OPS.sinkhorn = Sinkhorn.apply
    # Not compiled: one library call.
    OPS.grouped_mm = _grouped_mm
    hyper.coefficients = fast_coefficients
    for module in (block, draft, model, hyper):
        for name, function in (("collapse", fast_collapse), ("expand", fast_expand)):
            if hasattr(module, name):
                setattr(module, name, function)
    norm.rms_norm = fast_rms_norm
    experts.routed_experts = fast_routed_experts
    experts.swiglu = OPS.swiglu
    for module in (attention, indexer):
        module.rotate = fast_rotate
    attention.window_fp8, attention.latent_nvfp4 = OPS.window_fp8, OPS.latent_nvfp4
    indexer.index_mxfp4 = OPS.index_mxfp4
    indexer.index_scores = OPS.index_terms
    attention.sparse_attention = masked_attention
    Attention.select = masked_select
    Indexer.keys = detached_keys
    engram.Engram.gate = OPS.gate
    MixtureOfExperts.forward = fast_mixture
    VisionAttention.forward = canvas_attention
