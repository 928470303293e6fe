"""Starting values of the small checkpoint's parameters."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.reference.model import ReferenceModel


def initialise(model: ReferenceModel, seed: int) -> None:
    """Fill all parameters in place, reproducibly for one torch build.

    A compressor starts as its layer's window projection: what its queries learn to read in the window they can then
    read in compressed positions, too. Started apart, the two may never meet, and recall ends at the window.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = model.config.num_hidden_layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter, depth, generator))
        for layer in model.config.kv_source_layer_ids:
            attn = model.layers[layer].attn
            attn.compressor.wkv.weight.copy_(attn.wkv.weight)


def _values(name: str, like: Tensor, depth: int, generator: torch.Generator) -> Tensor:
    def normal(std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    leaf = name.rsplit(".", 2)
    if "hc_" in name:
        return _hyper(leaf[-1], like, normal)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return torch.ones_like(like)
    if like.dim() == 1:
        return normal(0.02) if name.startswith("image_") else torch.zeros_like(like)
    if name.endswith(("embed.weight", "markov_head.head.weight")):
        return normal(0.05 if "engram" not in name else 0.02)
    if name.endswith("confidence_head.proj.weight"):
        return torch.zeros_like(like)
    std = 1 / math.sqrt(like.shape[-1])
    if name.endswith(("wo_b.weight", "w2.weight", ".w2", "wo.weight")):
        std /= math.sqrt(2 * depth)
    if name.endswith("head.weight"):
        std /= 4
    return normal(std)


def _hyper(leaf: str, like: Tensor, normal: Callable[[float], Tensor]) -> Tensor:
    """Near the plain residual stream: collapse averages, each stream takes the output whole and mostly keeps itself."""
    if leaf == "fn":
        return normal(0.02)
    if leaf == "scale":
        return torch.ones_like(like)
    streams = math.isqrt(len(like) + 1) - 1
    base = torch.zeros_like(like)
    base[:streams] = -math.log(streams - 1)
    base[2 * streams :] = (2.5 * torch.eye(streams)).flatten()
    return base
