"""The weights of the inference model, as the operators take them. Written once at loading, then only read.

Letters in shapes: H hidden size, S streams, D head dim, h heads, E experts, I expert width. "Dense" weights have the
dtype of the activations (FP32 or BF16); a "matrix" is dense as well, or quantised if weights are kept as stored. The
rest is FP32, whatever the activations are; "wide" is FP32, or BF16 if weights are kept and were stored so.
"""

from dataclasses import dataclass

from torch import Tensor

from deepinfer.model.vision import VisionWeights
from deepinfer.ops.engram import EngramHashing
from deepinfer.ops.experts import Experts
from deepinfer.ops.linear import Weight


@dataclass(frozen=True)
class SiteWeights:
    """Norm and hyper-connection of one site; FP32."""

    norm: Tensor  # [H]
    fn: Tensor  # [2S + S*S, S*H]
    base: Tensor  # [2S + S*S]
    scale: Tensor  # [2S + S*S], the site's three scales spread over their coefficients


@dataclass(frozen=True)
class CompressorWeights:
    """Makes latents from normed layer inputs; FP32."""

    inputs: Tensor  # [D, H], with ratio 2 [2D, H]: values, then scores
    norm: Tensor  # [D]


@dataclass(frozen=True)
class IndexKeyWeights:
    """Makes index keys from latents."""

    wk: Tensor  # dense [index head dim, D]
    norm: Tensor  # FP32 [index head dim]


@dataclass(frozen=True)
class IndexerWeights:
    """Makes index queries and the weights of their heads."""

    wq_b: Weight  # matrix [index heads * index head dim, q_lora_rank]
    weights_proj: Tensor  # dense [index heads, H]


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention."""

    inputs: Weight  # matrix [q_lora_rank + D, H]: query latent, then window KV
    q_norm: Tensor  # FP32 [q_lora_rank]
    kv_norm: Tensor  # FP32 [D]
    wq_b: Weight  # matrix [h * D, q_lora_rank]
    sink: Tensor  # FP32 [h]
    wo_a: Weight  # groups of matrices, as `grouped_linear` takes them: rank x (h / groups * D)
    wo_b: Weight  # matrix [H, groups * rank]
    compressor: CompressorWeights | None  # in KV sources
    index_keys: IndexKeyWeights | None  # in KV sources
    indexer: IndexerWeights | None  # in index sources


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's mixture of experts."""

    gate: Tensor  # wide [E, H]
    bias: Tensor  # FP32 [E], for text
    image_bias: Tensor  # FP32 [E], for image tokens
    w13: Experts  # matrices [E, 2I, H]: gate, then up; of fewer experts where ranks share them
    w2: Experts  # matrices [E, H, I], likewise
    shared_w13: Weight  # matrix [2I, H]
    shared_w2: Weight  # matrix [H, I]


@dataclass(frozen=True)
class EngramWeights:
    """One layer's n-gram memory; the table keeps its stored form, since a step reads a few rows of it."""

    codes: Tensor  # E4M3 bytes, uint8 [rows, C]
    scales: Tensor  # E8M0 bytes, uint8 [rows, C / 32]
    wkv: Weight  # matrix [(S + 1) * H, sizes * heads * C]
    qk: Tensor  # FP32 [S, H], query weight times key weight
    hashing: EngramHashing


@dataclass(frozen=True)
class LayerWeights:
    """One layer."""

    attention_site: SiteWeights
    expert_site: SiteWeights
    attention: AttentionWeights
    experts: ExpertWeights
    engram: EngramWeights | None


@dataclass(frozen=True)
class ModelWeights:
    """The target model without its drafter."""

    embed: Tensor  # dense [vocab, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # FP32 [H]
    head: Tensor  # wide [vocab, H]
    vision: VisionWeights | None

    @property
    def engrams(self) -> dict[int, EngramWeights]:
        """The Engram layers by number."""
        return {number: layer.engram for number, layer in enumerate(self.layers) if layer.engram is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in tensors(self))


@dataclass(frozen=True)
class DraftWeights:
    """The drafter; embedding and head are the target's."""

    main_proj: Tensor  # dense [H, drafting target layers * H]
    main_norm: Tensor  # FP32 [H]
    stages: tuple[LayerWeights, ...]
    wkv: Tensor  # dense [stages * D, H], the stages' own, by which context keys are made
    norm: Tensor  # FP32 [H]
    markov_embed: Tensor  # FP32 [vocab, r]
    markov_head: Tensor  # FP32 [vocab, r]
    confidence: Tensor  # FP32 [H + r]


def tensors(weights: object) -> list[Tensor]:
    """Every tensor in a tree of these dataclasses."""
    if isinstance(weights, Tensor):
        return [weights]
    parts = weights if isinstance(weights, tuple) else getattr(weights, "__dict__", {}).values()
    return [tensor for part in parts for tensor in tensors(part)]
