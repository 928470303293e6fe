"""Routed experts on Hopper: FP4 weights, FP8 activations. All shapes are known on the host: graphs can hold it."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer.ops import cuda
from deepinfer.ops.cuda import check, pointer, stream
from deepinfer.ops.experts.weights import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, Fp4Experts

MOST_COLUMNS = 5120
"""Of a row that is quantised."""
_MULTIPROCESSORS = 132
_SHARED_BYTES, _FIXED_BYTES, _STAGING_BYTES = 232448, 11264, 4608  # a multiprocessor's; a block's own; a warpgroup's
_MOST_STAGES = 24


class _Shape(ctypes.Structure):
    """`Args` of csrc/experts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "row_scale", "x_scale", "offsets", "out")),
        ("limit", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("experts", "row_tiles", "k_blocks", "max_tokens")),
        *((name, ctypes.c_int) for name in ("slot_bytes", "stages", "out_columns")),
    )


class _Kernel:
    """One of the kernels, by the widest token tile; chosen by how many visits an expert gets."""

    def __init__(self, visits: int, experts: int) -> None:
        each = visits / experts
        widths = ((8, 16), (16, 32), (40, 64), (100, 96))
        self.width = next((width for most, width in widths if each <= most), 256)
        self.kind = 0 if self.width <= 32 else {64: 1, 96: 2}.get(self.width, 3)
        self.warpgroups, self.blocks_each = (2, 4, 4, 2)[self.kind], (2, 1, 1, 1)[self.kind]
        self.columns_each = (2, 2, 2, 1)[self.kind]  # column blocks a pipeline slot
        self.library = cuda.library("experts", *(("-DCLUSTER=2",) if self.kind == 3 else ()))

    def launch(self, codes: Tensor, scales: Tensor, weight: Fp4Experts, offsets: Tensor, limit: float | None) -> Tensor:
        """codes E4M3 [V, C] in fragment order, scales FP32 [V] -> BF16 [V, R], or [V, R/2] after SwiGLU."""
        experts, rows, columns = weight.shape
        width = rows // 2 if limit is not None else rows
        out = torch.empty(len(codes), width, dtype=torch.bfloat16, device=codes.device)
        tile = self.width * TILE_COLUMNS + self.warpgroups // 2 * TILE_BYTES
        slot = -(-self.columns_each * tile // 1024) * 1024
        free = _SHARED_BYTES // self.blocks_each - _FIXED_BYTES - self.warpgroups * _STAGING_BYTES
        shape = _Shape(
            *map(pointer, (weight.tiles, weight.scales, scales, offsets, out)),
            limit or 0.0,
            *(experts, rows // TILE_ROWS, columns // TILE_COLUMNS, self.width),
            *(slot, min(_MOST_STAGES, free // slot), width),
        )
        blocks = _MULTIPROCESSORS * self.blocks_each
        arguments = int(limit is not None), self.kind, pointer(codes), len(codes), shape, blocks, stream()
        check(self.library.launch_gemm(*arguments), "the expert product")
        return out


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
    visits = rows * count
    if not visits:
        return torch.zeros_like(x) if base is None else base()
    kernel = _Kernel(visits, len(w13))
    offsets, order, places = _dispatch(kernel.library, chosen.contiguous(), len(w13))
    first = kernel.launch(*_quantize(kernel.library, x, visits, order, count, None), w13, offsets, limit)
    inner = _quantize(kernel.library, first, visits, order, 0, weights.contiguous())
    second = kernel.launch(*inner, w2, offsets, None)
    added = None if base is None else base()
    out = torch.empty_like(x)
    arguments = pointer(second), pointer(places), count, pointer(added), pointer(out), rows, x.shape[1], stream()
    check(kernel.library.launch_combine(*arguments), "the sum over experts")
    return out


def _dispatch(library: ctypes.CDLL, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Visits sorted by expert: (offsets int32 [E + 1], order int32 [V], places int32 [V]), inverse of each other."""
    visits, device = chosen.numel(), chosen.device
    counters = torch.empty(2 * experts, dtype=torch.int32, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=device)
    order, places = (torch.empty(visits, dtype=torch.int32, device=device) for _ in range(2))
    arguments = pointer(chosen), visits, experts, *map(pointer, (counters, offsets, order, places)), stream()
    check(library.launch_dispatch(*arguments), "the sorting of visits")
    return offsets, order, places


def _quantize(
    library: ctypes.CDLL, x: Tensor, rows: int, order: Tensor, each: int, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(E4M3 [rows, C] as bytes in fragment order, FP32 [rows]): row i is x[order[i] // each], or x[i] where each is 0.

    factors: FP32 by visit, multiplied into the scales.
    """
    codes = torch.empty(rows, x.shape[1], dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    arguments = pointer(x), pointer(order), each, pointer(factors), pointer(codes), pointer(scales), rows, x.shape[1]
    check(library.launch_quantise(*arguments, stream()), "the rounding of activations")
    return codes, scales
