"""The residual streams around a site: how a block enters them, reads them and mixes them."""

import torch
from torch import Tensor

from deepinfer.config.model import ModelConfig
from deepinfer.model.weights import SiteWeights
from deepinfer.ops.hyper_connections import Mix, coefficients, collapse
from deepinfer.ops.norm import rms_norm


def enter_streams(embedded: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Embeddings [M, H] in every stream [M, S, H], and the pre-mix FP32 [M, S] that reads the first of them."""
    x = embedded[:, None].expand(-1, config.hc_mult, -1)
    p = torch.zeros(x.shape[:2], device=x.device)
    p[:, 0].fill_(1)  # an assignment might copy from the host, which a recorded step cannot
    return x, p


def site_mix(x: Tensor, site: SiteWeights, config: ModelConfig) -> Mix:
    """The coefficients that streams [M, S, H] give a site."""
    return coefficients(x, site.fn, site.base, site.scale, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters)


def site_input(x: Tensor, p: Tensor, site: SiteWeights, config: ModelConfig) -> Tensor:
    """The normed input [M, H] of a site, collapsed with the pre-mix FP32 [M, S] of the site before."""
    return rms_norm(collapse(x, p), site.norm, config.rms_norm_eps)
