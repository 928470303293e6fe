"""Operators that take rows one by one: rounding, rotation, hyper-connections, router, window keys, SwiGLU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.experts import torch as experts_torch
from deepinfer.ops.experts import triton as experts_triton
from deepinfer.ops.hyper_connections import torch as hyper_torch
from deepinfer.ops.hyper_connections import triton as hyper_triton
from deepinfer.ops.indexer import triton as indexer_triton
from deepinfer.ops.kv_formats import pack_index, pack_window, unpack_index
from deepinfer.ops.kv_formats import triton as formats_triton
from deepinfer.ops.linear import torch as linear_torch
from deepinfer.ops.linear import triton as linear_triton
from deepinfer.ops.norm import torch as norm_torch
from deepinfer.ops.rope import torch as rope_torch
from deepinfer.ops.rope import triton as rope_triton
from deepinfer.ops.router import torch as router_torch
from deepinfer.ops.router import triton as router_triton
from deepinfer.ops.sparse_attention import triton as attention_triton
from op_bench.inputs import DIM, HEADS, HIDDEN, WIDTH, randn, turns
from op_bench.timing import Case, Prepared, Work, relative


def simple(name: str, rows: int, moved: float, limit: float, call: Callable[..., Any], wanted: Callable[..., Any],
           compare: Callable[[Any, Any], float], *arguments: Callable[[int], Any]) -> Case:  # fmt: skip
    """A case of an operator on rows: arguments are made from the number of rows, compared on the last 256."""

    def prepare() -> Prepared:
        made = [make(rows) for make in arguments]

        def error() -> float:
            some = [a[-256:] if isinstance(a, Tensor) and a.ndim and len(a) == rows else a for a in made]
            return compare(call(*some), wanted(*some))

        return Prepared([lambda: call(*made)] * (10 if rows < 1000 else 2), error)

    return Case(name, f"{rows} rows", Work(moved), limit, prepare)


def site() -> tuple[Tensor, Tensor, Tensor]:
    """Weights of a site's coefficients."""
    return (
        0.01 * randn(24, 4 * HIDDEN, dtype=torch.float32),
        randn(24, dtype=torch.float32),
        randn(24, dtype=torch.float32),
    )


_SITE: list[tuple[Tensor, Tensor, Tensor]] = []


def _mix(x: Tensor, module: Any) -> hyper_torch.Mix:
    if not _SITE:
        _SITE.append(site())
    made: hyper_torch.Mix = module.coefficients(x, *_SITE[0], 1e-20, 1e-6, 20)
    return made


def streams(rows: int) -> Case:
    """Streams after a site, and the next one's input."""
    norm = torch.ones(HIDDEN, device="cuda")
    mixes: dict[int, hyper_torch.Mix] = {}

    def mix(x: Tensor) -> hyper_torch.Mix:
        if len(x) not in mixes:
            mixes[len(x)] = _mix(x, hyper_triton)
        return mixes[len(x)]

    def wanted(y: Tensor, x: Tensor) -> Tensor:
        new = hyper_torch.expand(y, x, mix(x))
        return norm_torch.rms_norm(hyper_torch.collapse(new, mix(x).pre), norm, 1e-20)

    return simple(
        "mHC streams",
        rows,
        rows * HIDDEN * 2 * 10,
        1e-2,
        lambda y, x: hyper_triton.advance(y, x, mix(x), norm, 1e-20)[1],
        wanted,
        relative,
        lambda n: randn(n, HIDDEN),
        lambda n: randn(n, 4, HIDDEN),
    )


def statistics(rows: int) -> Case:
    """A site's coefficients."""
    return simple(
        "mHC coefficients",
        rows,
        rows * HIDDEN * 8 + 24 * 4 * HIDDEN * 4,
        1e-5,
        lambda x: _mix(x, hyper_triton),
        lambda x: _mix(x, hyper_torch),
        lambda a, b: max(map(relative, a, b)),
        lambda n: randn(n, 4, HIDDEN),
    )


def rounding(rows: int) -> Case:
    """Rows to FP8."""
    return simple(
        "round rows",
        rows,
        rows * HIDDEN * 3,
        0.0,
        linear_triton.quantize_rows,
        linear_torch.quantize_rows,
        lambda a, b: (a.codes.float() != b.codes.float()).float().mean().item(),
        lambda n: randn(n, HIDDEN),
    )


def queries(rows: int) -> Case:
    """Query heads: rotated, to FP16."""
    return simple(
        "rotate queries",
        rows,
        rows * HEADS * DIM * 4,
        1e-3,
        lambda q, t: rope_triton.rotate(q, t, torch.float16),
        lambda q, t: rope_torch.rotate(q.float(), t[:, None]),
        relative,
        lambda n: randn(n, HEADS, DIM),
        turns,
    )


def outputs(rows: int) -> Case:
    """Attention's output: rotated back, rounded group by group."""
    return simple(
        "round outputs",
        rows,
        rows * HEADS * DIM * 3,
        1e-3,
        lambda o, t: attention_triton.output_rows(o, t, 8),
        lambda o, t: linear_torch.quantize_rows(rope_torch.rotate(o, t[:, None].conj()).view(len(o), 8, -1)),
        lambda a, b: (a.codes.float() != b.codes.float()).float().mean().item(),
        lambda n: randn(n, HEADS, DIM),
        turns,
    )


def window(rows: int) -> Case:
    """Window keys: norm, rotation, rounding, both stores."""
    norm = torch.ones(DIM, device="cuda")

    def call(x: Tensor, t: Tensor) -> Tensor:
        packed = torch.empty(len(x), 528, dtype=torch.uint8, device="cuda")
        places = torch.arange(len(x), device="cuda")
        formats_triton.window_rows(x[:, 1280:], norm, t, 1e-20, places, packed, torch.empty_like(packed))
        return packed

    def wanted(x: Tensor, t: Tensor) -> Tensor:
        return pack_window(rope_torch.rotate(norm_torch.rms_norm(x[:, 1280:], norm, 1e-20), t))

    return simple(
        "window keys",
        rows,
        rows * (1024 + 2 * 528),
        1e-2,
        call,
        wanted,
        lambda a, b: (a != b).float().mean().item(),
        lambda n: randn(n, 1792),
        turns,
    )


def router(rows: int) -> Case:
    """The choice of six of 384."""
    gate = randn(384, 5120) / 72
    return simple(
        "router",
        rows,
        gate.numel() * 2 + rows * 5120 * 2,
        1e-5,
        lambda x: router_triton.choose(router_triton.logits(x, gate), bias(), 6, 1.5)[1],
        lambda x: router_torch.route(x, gate, bias(), 6, 1.5)[1],
        relative,
        lambda n: randn(n, 5120),
    )


_BIAS: list[Tensor] = []


def bias() -> Tensor:
    """A router's."""
    if not _BIAS:
        _BIAS.append(0.1 * randn(384, dtype=torch.float32))
    return _BIAS[0]


def index_queries(rows: int) -> Case:
    """Index queries: rotated, rounded, in the kernel's order."""

    def wanted(q: Tensor, t: Tensor, w: Tensor) -> Tensor:
        return (
            unpack_index(pack_index(rope_torch.rotate(q, t[:, None])), torch.float32).norm(dim=-1) * w.float() * 0.015
        )

    def call(q: Tensor, t: Tensor, w: Tensor) -> Any:
        return indexer_triton.queries(q, t, w, 0.015)

    def compare(made: Any, reference: Tensor) -> float:
        return relative(made[0].float().norm(dim=-1) * made[1], reference)

    return simple(
        "index queries",
        rows,
        rows * 32 * 128 * 3,
        1e-3,
        call,
        wanted,
        compare,
        lambda n: randn(n, 32, 128),
        turns,
        lambda n: randn(n, 32),
    )


def activation(rows: int) -> Case:
    """SwiGLU of the shared expert, rounded."""
    return simple(
        "SwiGLU and round",
        rows,
        rows * WIDTH * 5,
        2e-2,
        lambda x: experts_triton.activate(x, 10.0),
        lambda x: linear_torch.quantize_rows(experts_torch.swiglu(x, 10.0).bfloat16()),
        lambda a, b: (a.codes.float() != b.codes.float()).float().mean().item(),
        lambda n: randn(n, 2 * WIDTH),
    )
