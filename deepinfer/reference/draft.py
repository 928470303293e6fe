"""DSpark drafting: a block of tokens in one parallel pass, finished by a serial Markov tail."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepinfer.config.model import ModelConfig
from deepinfer.reference.attention import Attention, attend
from deepinfer.reference.experts import MixtureOfExperts
from deepinfer.reference.hyper import HyperConnection, collapse, expand
from deepinfer.reference.norm import Linear, RMSNorm


class MarkovHead(nn.Module):
    """A low-rank bigram bias: ``head(embed(previous token))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dspark_markov_rank)
        self.head = Linear(config.dspark_markov_rank, config.vocab_size)

    def forward(self, previous: Tensor) -> Tensor:
        """Token ids [...] -> FP32 bias [..., vocab]."""
        return nn.functional.linear(self.embed(previous).float(), self.head.weight.float())


class ConfidenceHead(nn.Module):
    """One logit per draft token: is it accepted, given that those before it were?"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = Linear(config.hidden_size + config.dspark_markov_rank, 1)

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        """Collapsed streams before the norm [..., H] and Markov embeddings [..., r] -> FP32 logits [...]."""
        joined = torch.cat((x.float(), previous.float()), dim=-1)
        return self.proj(joined)[..., 0]


class DraftStage(nn.Module):
    """One stage; the first also holds the feature projection, the last the heads, as in the checkpoint."""

    def __init__(self, config: ModelConfig, stage: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.hc_attn, self.hc_ffn = HyperConnection(config), HyperConnection(config)
        self.attn_norm, self.ffn_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.attn = Attention(config, config.num_hidden_layers + stage)
        self.ffn = MixtureOfExperts(config, config.dspark_n_routed_experts, config.dspark_num_experts_per_tok)
        if stage == 0:
            self.main_proj = Linear(len(config.dspark_target_layer_ids) * hidden, hidden)
            self.main_norm = RMSNorm(hidden, eps)
        if stage == config.draft_stages - 1:
            self.norm = RMSNorm(hidden, eps)
            self.markov_head, self.confidence_head = MarkovHead(config), ConfidenceHead(config)

    def forward(self, x: Tensor, p: Tensor, context: Tensor, mask: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over N blocks of G rows.

        ``x`` [N, G, S, H], ``p`` [N, G, S]; ``context`` [N, W, head_dim] are this stage's keys of the tokens before the
        anchor, ``mask`` bool [N, W] which of them exist; ``at`` int64 [N, G] positions. All rows see the same keys.
        """
        mix = self.hc_attn(x)
        h = self.attn_norm(collapse(x, p))
        _, q = self.attn.queries(h, at)
        keys = torch.cat((context, self.attn.keys_values(h, at)), dim=1)
        seen = torch.cat((mask, torch.ones_like(at, dtype=torch.bool)), dim=1)
        # All rows see the same keys, so rows count as further heads of one query.
        sinks = self.attn.attn_sink.repeat(at.shape[1])
        o = attend(q.flatten(1, 2)[:, None], keys[:, None], seen[:, None], sinks).view_as(q)
        x = expand(self.attn.output(o, at), x, mix)
        after = self.hc_ffn(x)
        is_image = torch.zeros_like(at, dtype=torch.bool)
        y = self.ffn(self.ffn_norm(collapse(x, mix.pre)), is_image)
        return expand(y, x, after), after.pre


class Draft(NamedTuple):
    """A drafted block of G tokens for each of N anchors."""

    tokens: Tensor  # int64 [N, G]
    base_logits: Tensor  # FP32 [N, G, vocab], before the Markov bias
    logits: Tensor  # FP32 [N, G, vocab]
    confidence: Tensor  # FP32 [N, G], logits


def draft_context(stages: Sequence[DraftStage], features: Tensor, positions: Tensor) -> list[Tensor]:
    """Every stage's context keys of target tokens: features [B, T, F] at ``positions`` [T] -> each [B, T, head_dim]."""
    vectors = stages[0].main_norm(stages[0].main_proj(features))
    return [stage.attn.keys_values(vectors, positions) for stage in stages]


def draft_hidden(
    stages: Sequence[DraftStage], inputs: Tensor, contexts: list[Tensor], mask: Tensor, at: Tensor, streams: int
) -> Tensor:
    """The parallel pass: embeddings [N, G, H] and each stage's window [N, W, head_dim] -> collapsed rows [N, G, H]."""
    x = inputs[..., None, :].expand(*inputs.shape[:-1], streams, inputs.shape[-1])
    p = torch.zeros(x.shape[:-1], device=x.device)
    p[..., 0] = 1
    for stage, context in zip(stages, contexts, strict=True):
        x, p = stage(x, p, context, mask, at)
    return collapse(x, p)


def finish_greedily(last: DraftStage, x: Tensor, base_logits: Tensor, anchors: Tensor) -> Draft:
    """The serial tail, taking the best token each time: x [N, G, H], base logits [N, G, vocab], anchors [N]."""
    previous, tokens, logits, confidence = anchors, [], [], []
    for index in range(x.shape[1]):
        logits.append(base_logits[:, index] + last.markov_head(previous))
        confidence.append(last.confidence_head(x[:, index], last.markov_head.embed(previous)))
        previous = logits[-1].argmax(-1)
        tokens.append(previous)
    return Draft(torch.stack(tokens, 1), base_logits, torch.stack(logits, 1), torch.stack(confidence, 1))
