"""Routed experts on Hopper: FP4 weights, FP8 activations. All shapes are known on the host: graphs can hold it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops import cuda
from deepinfer.ops.cuda import check, pointer, stream
from deepinfer.ops.experts.weights import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, Fp4Experts

MOST_COLUMNS = 5120
"""Of a row that is quantised."""
FEW_VISITS = 2048
"""Up to so many, every visit finds its place by itself."""
_MULTIPROCESSORS = 132
_SHARED_BYTES, _FIXED_BYTES, _STAGING_BYTES = 232448, 11264, 4608  # a multiprocessor's; a block's own; a warpgroup's
_MOST_STAGES = 24

_Rounded = tuple[Tensor, Tensor]
"""E4M3 [V, C] as bytes in fragment order, FP32 [V]."""


class _Shape(ctypes.Structure):
    """`Args` of csrc/experts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "row_scale", "x_scale", "offsets", "out", "parts", "flags")),
        ("limit", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("experts", "row_tiles", "k_blocks", "max_tokens")),
        *((name, ctypes.c_int) for name in ("slot_bytes", "stages", "out_columns", "early")),
    )


@dataclass(frozen=True)
class _Visits:
    """Visits sorted by expert, and what the two products share.

    offsets: int32 [E + 1]. order, places: int32 [V], inverse of each other: the visit at a place, and where a visit is.
    flags: int32 [2, ...], zeros, for each of the products.
    """

    offsets: Tensor
    order: Tensor
    places: Tensor
    flags: Tensor


class _Kernel:
    """One of the kernels, by the widest token tile; chosen by how many visits an expert gets."""

    def __init__(self, visits: int, experts: int) -> None:
        each = visits / experts
        widths = ((8, 16), (16, 32), (40, 64), (100, 96))
        self.width = next((width for most, width in widths if each <= most), 256)
        self.kind = 0 if self.width <= 32 else {64: 1, 96: 2}.get(self.width, 3)
        self.warpgroups, self.blocks_each = (2, 4, 4, 2)[self.kind], (2, 1, 1, 1)[self.kind]
        self.columns_each = (2, 2, 2, 1)[self.kind]  # column blocks a pipeline slot
        self.blocks = _MULTIPROCESSORS * self.blocks_each
        self.flags = self.blocks * self.warpgroups if self.kind == 0 else 0
        self.library = cuda.library("experts", *(("-DCLUSTER=2",) if self.kind == 3 else ()))

    def launch(self, rounded: _Rounded, weight: Fp4Experts, visits: _Visits, limit: float | None) -> Tensor:
        """E4M3 [V, C] in fragment order with FP32 scales [V] -> BF16 [V, R]; with a limit [V, R/2], after SwiGLU."""
        codes, scales = rounded
        experts, rows, columns = weight.shape
        first, device = limit is not None, codes.device
        width = rows // 2 if first else rows
        out = torch.empty(len(codes), width, dtype=torch.bfloat16, device=device)
        sums = self.blocks * self.warpgroups * 64 * self.width if self.flags else 0
        parts = torch.empty(sums, dtype=torch.float32, device=device)
        tile = self.width * TILE_COLUMNS + self.warpgroups // 2 * TILE_BYTES
        slot = -(-self.columns_each * tile // 1024) * 1024
        free = _SHARED_BYTES // self.blocks_each - _FIXED_BYTES - self.warpgroups * _STAGING_BYTES
        tensors = weight.tiles, weight.scales, scales, visits.offsets, out, parts, visits.flags[int(not first)]
        shape = _Shape(
            *map(pointer, tensors),
            limit or 0.0,
            *(experts, rows // TILE_ROWS, columns // TILE_COLUMNS, self.width),
            *(slot, min(_MOST_STAGES, free // slot), width, int(not first)),
        )
        arguments = int(first), self.kind, pointer(codes), len(codes), shape, self.blocks, stream()
        check(self.library.launch_gemm(*arguments), "the expert product")
        return out

    def enter(self, x: Tensor, chosen: Tensor, experts: int) -> tuple[_Visits, _Rounded]:
        """Sort visits of chosen [N, K] by expert; the rows of x [N, H] that they bring, rounded."""
        if chosen.numel() <= FEW_VISITS:
            return self._place_and_quantize(x, chosen, experts)
        visits = self._dispatch(chosen, experts)
        return visits, self.quantize(x, visits.order, chosen.shape[1], None)

    def quantize(self, x: Tensor, order: Tensor, each: int, factors: Tensor | None) -> _Rounded:
        """Row i is x[order[i] // each], or x[i] where each is 0. factors: FP32 by visit, multiplied into the scales."""
        rows, columns = len(order), x.shape[1]
        codes, scales = _rounded(rows, columns, x.device)
        arguments = pointer(x), pointer(order), each, pointer(factors), pointer(codes), pointer(scales), rows, columns
        check(self.library.launch_quantise(*arguments, stream()), "the rounding of activations")
        return codes, scales

    def _place_and_quantize(self, x: Tensor, chosen: Tensor, experts: int) -> tuple[_Visits, _Rounded]:
        visits, each, columns = chosen.numel(), chosen.shape[1], x.shape[1]
        offsets, order, places, flags = _integers(x.device, experts + 1, visits, visits, 2 * self.flags)
        rounded = _rounded(visits, columns, x.device)
        arguments = pointer(x), pointer(chosen), each, visits, experts, pointer(flags), len(flags)
        made = map(pointer, (offsets, order, places, *rounded))
        check(self.library.launch_place_and_quantise(*arguments, *made, columns, stream()), "the rounding of visits")
        return _Visits(offsets, order, places, flags.view(2, self.flags)), rounded

    def _dispatch(self, chosen: Tensor, experts: int) -> _Visits:
        visits = chosen.numel()
        sizes = 2 * experts + 2 * self.flags, experts + 1, visits, visits
        counters, offsets, order, places = _integers(chosen.device, *sizes)
        arguments = pointer(chosen), visits, experts, pointer(counters), len(counters)
        made = map(pointer, (offsets, order, places))
        check(self.library.launch_dispatch(*arguments, *made, stream()), "the sorting of visits")
        return _Visits(offsets, order, places, counters[2 * experts :].view(2, self.flags))


def routed_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: Fp4Experts,
    w2: Fp4Experts,
    limit: float,
    base: Callable[[], Tensor] | None = None,
) -> Tensor:
    """As `torch.routed_experts`, for x BF16 [N, H]; what `base` gives, [N, H], is added to the sum."""
    rows, count = chosen.shape
    if not rows * count:
        return torch.zeros_like(x) if base is None else base()
    kernel = _Kernel(rows * count, len(w13))
    visits, rounded = kernel.enter(x, chosen.contiguous(), len(w13))
    first = kernel.launch(rounded, w13, visits, limit)
    second = kernel.launch(kernel.quantize(first, visits.order, 0, weights.contiguous()), w2, visits, None)
    added = None if base is None else base()
    out = torch.empty_like(x)
    tensors = pointer(second), pointer(visits.places), count, pointer(added), pointer(out)
    check(kernel.library.launch_combine(*tensors, rows, x.shape[1], stream()), "the sum over experts")
    return out


def _rounded(rows: int, columns: int, device: torch.device) -> _Rounded:
    return torch.empty(rows, columns, dtype=torch.uint8, device=device), torch.empty(rows, device=device)


def _integers(device: torch.device, *sizes: int) -> tuple[Tensor, ...]:
    return torch.split(torch.empty(sum(sizes), dtype=torch.int32, device=device), list(sizes))
