"""The cache formats' round trips as differentiable operators (straight-through gradient)."""

from collections.abc import Callable

from torch import Tensor

from deepinfer.checkpoint import formats


def _straight_through(x: Tensor, round_trip: Callable[[Tensor], Tensor]) -> Tensor:
    rounded = round_trip(x.detach())
    if not x.requires_grad:
        return rounded
    return x + (rounded - x.detach())


def window_fp8(x: Tensor) -> Tensor:
    """Window KV [..., C] after its FP8 round trip (blocks of 32, power-of-two scales)."""
    return _straight_through(x, formats.window_fp8)


def latent_nvfp4(x: Tensor) -> Tensor:
    """Compressed KV [..., C] after its NVFP4 round trip (blocks of 16, E4M3 scales)."""
    return _straight_through(x, formats.latent_nvfp4)


def index_mxfp4(x: Tensor) -> Tensor:
    """Indexer queries or keys [..., C] after their MXFP4 round trip (blocks of 32, power-of-two scales)."""
    return _straight_through(x, formats.index_mxfp4)
