"""Compressed KV: one latent per token (ratio 1) or per pair of tokens (ratio 2), made by KV-source layers."""

import torch
from torch import Tensor, nn

from deepinfer.config.model import ModelConfig
from deepinfer.reference.norm import RMSNorm


def pool_pairs(values: Tensor, scores: Tensor) -> Tensor:
    """Softmax over each pair of tokens, channel by channel, and weighted sum.

    ``values``, ``scores`` FP32 [B, T, C] -> FP32 [B, T // 2, C]; a last odd token waits for its partner.
    """
    pairs = values.shape[1] // 2
    values = values[:, : 2 * pairs].unflatten(1, (pairs, 2))
    scores = scores[:, : 2 * pairs].unflatten(1, (pairs, 2))
    return (scores.softmax(2) * values).sum(2)


class Compressor(nn.Module):
    """Maps normed layer inputs to normed latents, before rotation and rounding."""

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        if ratio == 2:
            self.wgate = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, h: Tensor) -> Tensor:
        """``h`` [B, T, H] -> latents [B, T // ratio, head_dim] in the dtype of ``h``; products in FP32."""
        wide = h.float()
        values = self.wkv(wide)
        if self.ratio == 2:
            values = pool_pairs(values, self.wgate(wide))
        return self.norm(values.to(h.dtype))


def visible_count(positions: Tensor, ratio: int) -> Tensor:
    """How many compressed positions each query position sees: ``floor((t + 1) / ratio)``."""
    return torch.div(positions + 1, ratio, rounding_mode="floor")
