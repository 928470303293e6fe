"""What one step needs beside weights and caches: an estimate from the sizes of its largest intermediate values."""

from deepinfer.config.model import ModelConfig

FP32 = 4


def workspace_bytes(c: ModelConfig, rows: int, context: int, requests: int, activation: int = FP32) -> dict[str, int]:
    """Bytes of each large intermediate value in a step of `rows` rows, `activation` bytes a number.

    Residual streams count twice (before and after a layer), queries too (they and what attention makes of them). Index
    scores are those of one request, whose rows all look at `context` tokens, FP32 with one value a head. The logits are
    FP32, one row a request.
    """
    scored = min(rows, _ROWS_SCORED)
    return {
        "residual streams": 2 * rows * c.hc_mult * c.hidden_size * activation,
        "queries and outputs": 2 * rows * c.num_attention_heads * c.head_dim * activation,
        "index scores": scored * context * (c.index_n_heads + 1) * FP32,
        "logits": requests * c.vocab_size * FP32,
    }


_ROWS_SCORED = 64
