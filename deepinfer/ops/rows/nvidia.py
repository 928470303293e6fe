"""The kernels, for the released model's shapes."""

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.ops.indexer import cuda as selection
from deepinfer.ops.indexer import triton as indexer
from deepinfer.ops.kv_formats.triton import window_rows
from deepinfer.ops.linear import Weight, grouped_linear, linear
from deepinfer.ops.linear.triton import quantize_groups
from deepinfer.ops.rope.triton import rotate
from deepinfer.ops.rows import torch as plain
from deepinfer.ops.rows.index import Index
from deepinfer.ops.sparse_attention import cuda as attention
from deepinfer.ops.sparse_attention.triton import output_rows

__all__ = ["attend", "best_entries", "entry_rows", "fits", "index_scores", "output", "window_rows"]


def fits(config: ModelConfig) -> bool:
    """Whether the model has the shapes that the kernels are made for."""
    return (
        config.num_attention_heads == attention.HEADS
        and config.head_dim == attention.CHANNELS
        and config.sliding_window == attention.WINDOW
        and config.index_topk == attention.CHOSEN
        and config.index_n_heads == indexer.HEADS
        and config.index_head_dim == indexer.CHANNELS
        and config.qk_rope_head_dim == indexer.TURNED
    )


def attend(
    q: Tensor,
    turns: Tensor,
    windows: Tensor,
    near: Tensor,
    latents: Tensor | None,
    chosen: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """q BF16 [M, h, D], turns complex64 [M, F], near [M, W], chosen [M, K], sink [h] -> BF16 [M, h, D]."""
    return attention.attend_rows(rotate(q, turns, torch.float16), windows, near, latents, chosen, sink)


def output(o: Tensor, turns: Tensor, wo_a: Weight, wo_b: Weight) -> Tensor:
    """o BF16 [M, h, D], turns complex64 [M, F] -> BF16 [M, H]."""
    return linear(quantize_groups(grouped_linear(output_rows(o, turns, len(wo_a)), wo_a)), wo_b)


def index_scores(q: Tensor, turns: Tensor, weights: Tensor, factor: float, index: Index) -> Tensor:
    """q BF16 [M, h, d], turns complex64 [M, F], weights [M, h] -> FP32 [M, length]."""
    if not selection.fits(index):  # pages of few tokens
        return plain.index_scores(q, turns, weights, factor, index)
    return selection.scores(*indexer.queries(q, turns, weights, factor), index)


def best_entries(scores: Tensor, index: Index, count: int) -> Tensor:
    """scores FP32 [M, length] -> int32 [M, count]."""
    assert count == selection.COUNT
    return selection.best_entries(scores, index)


def entry_rows(entries: Tensor, index: Index) -> Tensor:
    """entries int32 [M, K] -> int32 [M, K]."""
    return indexer.entry_rows(entries, index.slots, index.page_table, index.entries)
