"""The vision tower: a ViT over patches, and an aligner that merges patches into token embeddings."""

import torch
from torch import Tensor, nn

from deepinfer.config.model import VisionConfig
from deepinfer.reference.norm import Linear, RMSNorm


def grid_angles(rows: int, cols: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Rotation angles of every patch, row-major: FP32 [rows * cols, head_dim / 2]; first half from the row."""
    quarter = head_dim // 4
    freqs = theta ** (-torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
    row = torch.arange(rows, device=device).repeat_interleave(cols)
    col = torch.arange(cols, device=device).repeat(rows)
    return torch.cat((row[:, None] * freqs, col[:, None] * freqs), dim=-1)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate channel i with channel i + D/2: x [N, P, heads, D], angles [P, D/2], products in FP32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class VisionAttention(nn.Module):
    """Full attention among the patches of one image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.wo = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """[N, P, C] -> [N, P, C]."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.wqkv(x).chunk(3, dim=-1))
        q, k = rotate_halves(q, angles), rotate_halves(k, angles)
        scores = torch.einsum("nphd,nqhd->nhpq", q, k).float() * q.shape[-1] ** -0.5
        mixed = torch.einsum("nhpq,nqhd->nphd", scores.softmax(-1).to(x.dtype), v)
        return self.wo(mixed.flatten(-2))


class VisionMLP(nn.Module):
    """SwiGLU; ``w1`` holds gate then up."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.w2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C]."""
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(nn.functional.silu(gate) * up)


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.hidden_size, 1e-6), RMSNorm(config.hidden_size, 1e-6)
        self.attn, self.mlp = VisionAttention(config), VisionMLP(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """[N, P, C] -> [N, P, C]."""
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class PatchEmbedding(nn.Module):
    """Linear embedding of flattened patches (channel, row, column)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = Linear(3 * config.patch_size**2, config.hidden_size, bias=True)

    def forward(self, patches: Tensor) -> Tensor:
        """[N, P, 3, p, p] -> [N, P, C]."""
        return self.proj(patches.flatten(2))


class VisionTower(nn.Module):
    """Patches of images that share one grid -> hidden states."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim, self.theta = config.hidden_size // config.num_attention_heads, config.rope_theta
        self.patch_embed = PatchEmbedding(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, 1e-6)

    def forward(self, patches: Tensor, rows: int, cols: int) -> Tensor:
        """[N, rows * cols, 3, p, p] -> [N, rows * cols, C]."""
        angles = grid_angles(rows, cols, self.head_dim, self.theta, patches.device)
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)


class Aligner(nn.Module):
    """Merges ``downsample_ratio`` squared patches into one token embedding."""

    def __init__(self, config: VisionConfig, hidden: int) -> None:
        super().__init__()
        self.ratio = config.downsample_ratio
        self.w1 = Linear(config.hidden_size * self.ratio**2, hidden, bias=True)
        self.w2 = Linear(hidden, hidden, bias=True)

    def forward(self, x: Tensor, rows: int, cols: int) -> Tensor:
        """[N, rows * cols, C] -> [N, merged rows * merged cols, H]; the grid is zero-padded at bottom and right."""
        image = x.transpose(1, 2).unflatten(-1, (rows, cols))
        image = nn.functional.pad(image, (0, -cols % self.ratio, 0, -rows % self.ratio))
        merged = nn.functional.unfold(image, self.ratio, stride=self.ratio).transpose(1, 2)
        return self.w2(nn.functional.gelu(self.w1(merged)))
