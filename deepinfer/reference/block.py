"""One transformer block: Engram, attention and experts around the hyper-connected residual streams."""

from torch import Tensor, nn

from deepinfer.config.model import ModelConfig
from deepinfer.reference.attention import Attention, Rows, SharedKV
from deepinfer.reference.engram import Engram, Memory
from deepinfer.reference.experts import MixtureOfExperts
from deepinfer.reference.hyper import HyperConnection, Mix, collapse, expand
from deepinfer.reference.norm import RMSNorm


class Block(nn.Module):
    """State between blocks: streams x [B, T, S, H] and the pre-mix p FP32 [B, T, S] of the next collapse."""

    def __init__(self, config: ModelConfig, layer: int, experts: int, per_token: int) -> None:
        super().__init__()
        self.hc_attn, self.hc_ffn = HyperConnection(config), HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer)
        self.ffn = MixtureOfExperts(config, experts, per_token)
        if config.has_engram(layer):
            self.engram = Engram(config, layer)

    def remember(self, x: Tensor, memory: Memory) -> Tensor:
        """Add the n-gram memory to the streams where this layer has one."""
        return self.engram(x, memory) if hasattr(self, "engram") else x

    def attention_input(self, x: Tensor, p: Tensor) -> Tensor:
        """Collapse with the previous site's pre-mix, then norm: [B, T, H]."""
        return self.attn_norm(collapse(x, p))

    def feed_forward(self, x: Tensor, mix: Mix, is_image: Tensor) -> tuple[Tensor, Tensor]:
        """The second site: (streams, pre-mix) for the next block."""
        after = self.hc_ffn(x)
        y = self.ffn(self.ffn_norm(collapse(x, mix.pre)), is_image)
        return expand(y, x, after), after.pre

    def forward(self, x: Tensor, h: Tensor, rows: Rows, shared: SharedKV | None) -> tuple[Tensor, Tensor, Tensor]:
        """Both sites from streams and attention input: (streams, pre-mix, attention output [B, T, H])."""
        mix = self.hc_attn(x)
        y = self.attn(h, rows, shared)
        x, p = self.feed_forward(expand(y, x, mix), mix, rows.is_image)
        return x, p, y
