"""What an H200 could do at best: bytes over its bandwidth, operations over its measured rate."""

from deepinfer.config.model import ModelConfig
from deepinfer.model.weights import ModelWeights, tensors

BYTES_PER_S = 4.25e12
OPERATIONS_PER_S = 1.24e15


def decode_step_seconds(config: ModelConfig, weights: ModelWeights, requests: int) -> float:
    """Every weight that a step of `requests` rows touches, read once; KV and activations not counted."""
    fixed = weights.nbytes - weights.embed.nbytes
    touched = 0.0
    for layer in weights.layers:
        experts = sum(t.nbytes for part in (layer.experts.w13, layer.experts.w2) for t in tensors(part))
        share = config.num_experts_per_tok / config.n_routed_experts
        touched += experts * (1 - (1 - share) ** requests)
        fixed -= experts
        if layer.engram is not None:
            fixed -= layer.engram.codes.nbytes + layer.engram.scales.nbytes
    return (fixed + touched) / BYTES_PER_S


def prefill_token_seconds(config: ModelConfig) -> float:
    """The products of one token in the encoder's layers, at the FP8 rate; index scores not counted."""
    c, hidden = config, config.hidden_size
    attention = hidden * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * c.num_attention_heads * c.head_dim
    attention += c.num_attention_heads * c.head_dim * c.o_lora_rank + c.o_groups * c.o_lora_rank * hidden
    experts = (c.num_experts_per_tok + c.n_shared_experts) * 3 * hidden * c.moe_intermediate_size
    attended = 2 * c.num_attention_heads * c.head_dim * (c.sliding_window + c.index_topk)
    # Attention runs at the 16-bit rate, about 0.56 of that of FP8.
    return 2 * c.decoder_start * (attention + experts + attended / 0.56) / OPERATIONS_PER_S
