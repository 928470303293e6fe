"""What one step needs beside weights and caches: an estimate from the largest intermediate values of the operators."""

from deepinfer.config.model import ModelConfig
from deepinfer.model.selection import TERMS_CPU
from deepinfer.ops.sparse_attention.torch import ROWS_CPU

FP32, INT64 = 4, 8


def workspace_bytes(c: ModelConfig, rows: int, context: int, requests: int, activation: int) -> dict[str, int]:
    """Bytes that are live at once in a step of `rows` rows over `requests` contexts, `activation` bytes a number.

    Streams live through a layer; attention and experts follow each other, so only the larger of the two counts.
    """
    attention, experts = _attention(c, rows, context, requests, activation), _experts(c, rows, activation)
    name = "attention" if attention > experts else "experts"
    streams = rows * c.hc_mult * c.hidden_size * (2 * activation + FP32)  # before and after a site, and in FP32
    return {"residual streams": streams, name: max(attention, experts), "logits": 2 * requests * c.vocab_size * FP32}


def _attention(c: ModelConfig, rows: int, context: int, requests: int, activation: int) -> int:
    """Queries and outputs, plain and rotated; scores; and what is unpacked of the longest source's compressed KV.

    All requests' index keys are unpacked (with FP4 codes widened to 32 bits on the way); latents only where they are
    chosen, or all of one prompt. Scores are made for a row of every request at least, head by head, and then sorted.
    """
    entries = context // min(c.ratio(layer) for layer in c.kv_source_layer_ids)
    queries = 4 * rows * c.num_attention_heads * c.head_dim * activation
    keys = requests * entries * c.index_head_dim * (activation + FP32 // 2)
    pairs = max(requests, min(rows, TERMS_CPU // (entries * c.index_n_heads))) * entries
    scores = pairs * (c.index_n_heads * 2 * activation + FP32 + 2 * INT64)
    at_once = max(requests, min(rows, ROWS_CPU))
    chosen = min(c.index_topk, entries)
    latents = max(at_once * chosen, min(entries, rows * chosen)) * c.head_dim * activation
    attended = at_once * c.num_attention_heads * (c.sliding_window + ROWS_CPU + chosen) * 2 * FP32
    return queries + keys + scores + latents + attended


def _experts(c: ModelConfig, rows: int, activation: int) -> int:
    """For every visit of a row to an expert: the row, gate and up, their product in FP32, and the result twice."""
    visit = (3 * c.hidden_size + 2 * c.moe_intermediate_size) * activation + 3 * c.moe_intermediate_size * FP32
    return rows * c.num_experts_per_tok * visit
