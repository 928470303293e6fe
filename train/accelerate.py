"""Equivalents of the reference's hot operators that train fast on one GPU.

Same maths and signatures as in `deepinfer.reference`; the shapes are static and nothing waits for the host, so a whole
training step can be captured in a CUDA graph.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer.reference import attention, block, draft, engram, experts, hyper, indexer, model, norm
from deepinfer.reference.hyper import Mix
from deepinfer.reference.vision import VisionAttention
from train.grouped_experts import fast_mixture, fast_routed_experts
from train.masked_attention import detached_keys, masked_attention, masked_select
from train.operators import OPS, STATE, Operators


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


def canvas_attention(self: VisionAttention, x: Tensor, angles: Tensor) -> Tensor:
    """See `VisionAttention.forward`, for images of several grids on one canvas: patches see those of their image."""
    q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.wqkv(x).chunk(3, dim=-1))
    q, k = (OPS.rotate_halves(part, angles).transpose(1, 2) for part in (q, k))
    mask = None if STATE.patch_mask is None else STATE.patch_mask[:, None, None]
    mixed = nn.functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=mask)
    return self.wo(mixed.transpose(1, 2).flatten(-2))


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, fast function) of everything that takes the place of a reference operator."""
    yield hyper, "coefficients", fast_coefficients
    for module in (block, draft, model):
        yield module, "collapse", fast_collapse
    for module in (block, draft):
        yield module, "expand", fast_expand
    yield norm, "rms_norm", fast_rms_norm
    yield experts, "routed_experts", fast_routed_experts
    yield experts, "swiglu", OPS.swiglu
    yield attention, "rotate", fast_rotate
    yield indexer, "rotate", fast_rotate
    yield attention, "window_fp8", OPS.window_fp8
    yield attention, "latent_nvfp4", OPS.latent_nvfp4
    yield indexer, "index_mxfp4", OPS.index_mxfp4
    yield indexer, "index_scores", OPS.index_terms
    yield attention, "sparse_attention", masked_attention
    yield attention.Attention, "select", masked_select
    yield indexer.Indexer, "keys", detached_keys
    yield engram.Engram, "gate", OPS.gate
    yield experts.MixtureOfExperts, "forward", fast_mixture
    yield VisionAttention, "forward", canvas_attention


def compile_operators() -> None:
    """Compile the plain operators; Sinkhorn has kernels of its own, and the grouped product is one library call."""
    from train.sinkhorn import Sinkhorn

    torch._dynamo.config.recompile_limit = 64
    for name in set(Operators.__dataclass_fields__) - {"sinkhorn", "grouped_mm"}:
        setattr(OPS, name, torch.compile(getattr(OPS, name), dynamic=False))
    OPS.sinkhorn = Sinkhorn.apply


def install(compiled: bool) -> None:
    """Put the fast operators in the reference's place, for this process."""
    if compiled:
        compile_operators()
    for owner, name, function in replacements():
        setattr(owner, name, function)
