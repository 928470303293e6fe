"""The mixture of experts of one layer: router, routed experts, shared expert."""

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.model.weights import ExpertWeights
from deepinfer.ops.experts import routed_experts, shared_expert
from deepinfer.ops.router import route


def mixture(h: Tensor, is_image: Tensor | None, per_token: int, weights: ExpertWeights, config: ModelConfig) -> Tensor:
    """h: normed rows [M, H] -> [M, H]. is_image: bool [M], rows that choose by the image bias; None: none do."""
    bias = weights.bias
    if is_image is not None:
        bias = torch.where(is_image[:, None], weights.image_bias, bias)
    chosen, routing = route(h, weights.gate, bias, per_token, config.routed_scaling_factor)
    shared = shared_expert(h, weights.shared_w13, weights.shared_w2, config.swiglu_limit)
    return routed_experts(h, chosen, routing, weights.w13, weights.w2, config.swiglu_limit, shared)
