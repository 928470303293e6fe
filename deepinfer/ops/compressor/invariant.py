"""The batch-invariant version."""

import torch
from torch import Tensor

from deepinfer.core.batch import Pairs
from deepinfer.ops.compressor.torch import partners
from deepinfer.ops.invariance import elementwise


def pool_pairs(values: Tensor, scores: Tensor) -> Tensor:
    """values, scores FP32 [W, 2, C] -> FP32 [W, C]."""
    weights = elementwise(Tensor.exp, scores - scores.amax(1, keepdim=True))
    weighted = weights * values
    return (weighted[:, 0] + weighted[:, 1]) / (weights[:, 0] + weights[:, 1])


def pool_rows(made: Tensor, pending: Tensor, pairs: Pairs, dtype: torch.dtype) -> Tensor:
    """made FP32 [N, 2, C], pending FP32 [slots, ring, 2, C] -> FP32 [W, C]."""
    return pool_pairs(*partners(made, pending, pairs))
