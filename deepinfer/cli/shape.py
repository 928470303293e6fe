"""A model's dimensions in words."""

from deepinfer.config.model import ModelConfig


def shape(c: ModelConfig) -> dict[str, str]:
    """Part of the model -> its dimensions."""
    facts = {
        "layers": f"{c.num_hidden_layers}: {c.decoder_start} encoder, {c.num_hidden_layers - c.decoder_start} decoder",
        "hidden, vocabulary": f"{c.hidden_size} in {c.hc_mult} residual streams, {c.vocab_size}",
        "context": f"{c.max_position_embeddings:,} tokens",
        "attention": f"{c.num_attention_heads} heads of {c.head_dim} ({c.qk_rope_head_dim} rotary), one shared KV head",
        "window": f"{c.sliding_window} tokens",
        "selection": f"{c.index_n_heads} heads of {c.index_head_dim}, best {c.index_topk}{_candidates(c)}",
        "experts": f"{c.n_routed_experts} routed, {c.num_experts_per_tok} a token, {c.n_shared_experts} shared, width "
        f"{c.moe_intermediate_size}",
    }
    return {**facts, "Engram": _engram(c), "drafter": _drafter(c), "vision": _vision(c)}


def _candidates(c: ModelConfig) -> str:
    if not c.candidates_enabled:
        return ""
    blocks = f"{c.candidate_topk_blocks} blocks of {c.candidate_block_size}"
    return f"; after layer {c.candidate_source_layer_id} among its {blocks}"


def _engram(c: ModelConfig) -> str:
    if not c.engram_layer_ids:
        return "none"
    rows = ", ".join(f"{count:,}" for count in c.engram_num_embeddings)
    sizes = f"n-grams of 2 to {c.engram_max_ngram_size}, {c.engram_n_heads} heads each"
    return f"{sizes}; {rows} rows of {c.engram_head_dim}"


def _drafter(c: ModelConfig) -> str:
    if not c.draft_stages:
        return "none"
    return (
        f"{c.draft_stages} stages, {c.dspark_block_size} tokens a block, {c.dspark_n_routed_experts} experts, "
        f"{c.dspark_num_experts_per_tok} a token"
    )


def _vision(c: ModelConfig) -> str:
    if c.vision is None:
        return "none"
    v = c.vision
    return f"{v.num_hidden_layers} layers, {v.hidden_size} wide, patches of {v.patch_size}, {v.max_image_tokens} tokens"
