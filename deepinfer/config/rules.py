"""The rules between the keys of a model configuration; each breach is one ConfigError that names the keys."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.config.model import ModelConfig, VisionConfig

QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}


def check_encodings(data: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None, where: str) -> None:
    """Accept only the released encodings: untied head, YaRN, E4M3 weights with power-of-two 32x32 block scales."""
    rule = _Rules(where)
    rule(not data.get("tie_word_embeddings"), "tie_word_embeddings takes false: the head has its own weight")
    kind = {} if rope_scaling is None else rope_scaling
    kind = kind.get("rope_type", kind.get("type", "yarn"))
    rule(kind == "yarn", f'rope_scaling: rope_type takes "yarn" or no rope_scaling at all, not {kind!r}')
    quantization = data.get("quantization_config") or {}
    rule(isinstance(quantization, Mapping), f"quantization_config takes an object, not {quantization!r}")
    for key, accepted in QUANTIZATION.items():
        value = quantization.get(key, accepted)
        rule(value == accepted, f"quantization_config: {key} takes {accepted!r}, not {value!r}")


def check_model(c: "ModelConfig", where: str) -> None:
    """Raise ConfigError for the first rule that configuration `c` breaks."""
    rule = _Rules(where)
    _check_tokens(c, rule)
    _check_attention(c, rule)
    _check_schedule(c, rule)
    _check_candidates(c, rule)
    _check_experts(c, rule)
    if c.engram_layer_ids:
        _check_engram(c, rule)
    if c.num_nextn_predict_layers:
        _check_draft(c, rule)
    if c.vision is not None:
        _check_vision(c.vision, rule)


class _Rules:
    """States rules: `rule(holds, message)`; the message says what is wrong and what would be accepted."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __call__(self, holds: bool, message: str) -> None:
        if not holds:
            raise ConfigError(f"{self._where}: {message}")

    def layer_ids(self, name: str, ids: Sequence[int], layers: int) -> None:
        self(bool(ids), f"{name} takes at least one layer id")
        self(list(ids) == sorted(set(ids)), f"{name} takes ascending layer ids without repeats, not {list(ids)}")
        self(ids[-1] < layers, f"{name} names layer {ids[-1]}; the model has layers 0 to {layers - 1}")

    def multiple(self, name: str, value: int, of: int, why: str) -> None:
        self(value % of == 0, f"{name} takes a multiple of {of} ({why}), not {value}")

    def present(self, name: str, value: int, why: str) -> None:
        self(value > 0, f"{name} takes an integer of at least 1 ({why}), not {value}")


def _check_tokens(c: "ModelConfig", rule: _Rules) -> None:
    tokens = {"bos_token_id": c.bos_token_id, "eos_token_id": c.eos_token_id, "pad_token_id": c.pad_token_id}
    if c.image_token_id is not None:
        tokens["image_token_id"] = c.image_token_id
    if c.engram_layer_ids:
        tokens["engram_pad_token_id"] = c.engram_pad_token_id
    if c.num_nextn_predict_layers:
        tokens["dspark_noise_token_id"] = c.dspark_noise_token_id
    for name, token in tokens.items():
        rule(token < c.vocab_size, f"{name} = {token} is outside the vocabulary of {c.vocab_size} tokens (vocab_size)")
    named = c.vision is None or c.image_token_id is not None
    rule(named, "image_token_id is missing; a model with a vision_config needs it")


def _check_attention(c: "ModelConfig", rule: _Rules) -> None:
    rule(c.num_key_value_heads == 1, f"num_key_value_heads takes 1 (heads share one KV), not {c.num_key_value_heads}")
    rule.multiple("num_attention_heads", c.num_attention_heads, c.o_groups, "o_groups")
    rule.multiple("head_dim", c.head_dim, 32, "the FP8 blocks of the window KV")
    rule.multiple("index_head_dim", c.index_head_dim, 32, "the FP4 blocks of index queries and keys")
    rule.multiple("qk_rope_head_dim", c.qk_rope_head_dim, 2, "RoPE rotates pairs")
    smaller = min(c.head_dim, c.index_head_dim)
    rope = c.qk_rope_head_dim
    rule(rope <= smaller, f"qk_rope_head_dim takes at most {smaller} (head_dim and index_head_dim), not {rope}")


def _check_schedule(c: "ModelConfig", rule: _Rules) -> None:
    layers, stages, ratios = c.num_hidden_layers, c.num_nextn_predict_layers, c.compress_ratios
    rule(
        len(ratios) == layers + stages,
        f"compress_ratios takes {layers + stages} entries (num_hidden_layers = {layers} and then "
        f"num_nextn_predict_layers = {stages}), not {len(ratios)}",
    )
    rule(set(ratios) <= {0, 1, 2}, f"compress_ratios takes the entries 0, 1 and 2, not {max(ratios)}")
    rule(not any(ratios[layers:]), f"compress_ratios takes 0 for the draft stages, not {list(ratios[layers:])}")
    for name, ids in (
        ("kv_source_layer_ids", c.kv_source_layer_ids),
        ("index_source_layer_ids", c.index_source_layer_ids),
    ):
        rule.layer_ids(name, ids, layers)
        for layer in ids:
            rule(ratios[layer] > 0, f"{name} names layer {layer}, whose ratio is 0: a window-only layer is no source")
    for layer in c.kv_source_layer_ids:
        rule(
            layer in c.index_source_layer_ids,
            f"layer {layer} is in kv_source_layer_ids, so index_source_layer_ids must name it too",
        )
    for layer in range(layers):
        _check_source_ratio(c, layer, rule)


def _check_source_ratio(c: "ModelConfig", layer: int, rule: _Rules) -> None:
    """A compressed layer reads the latest KV source at or before it, made at its own ratio."""
    ratio = c.compress_ratios[layer]
    if ratio == 0:
        return
    sources = [source for source in c.kv_source_layer_ids if source <= layer]
    rule(bool(sources), f"layer {layer} has ratio {ratio} but no layer of kv_source_layer_ids stands at or before it")
    found = c.compress_ratios[sources[-1]]
    rule(
        found == ratio,
        f"layer {layer} has ratio {ratio}, but the latest KV source at or before it, layer {sources[-1]}, has ratio "
        f"{found}; they must be the same",
    )


def _check_candidates(c: "ModelConfig", rule: _Rules) -> None:
    if not c.candidates_enabled:
        return
    source = c.candidate_source_layer_id
    sources = list(c.kv_source_layer_ids)
    rule(source in sources, f"candidate_source_layer_id takes a KV source ({sources}) or -1, not {source}")
    rule(c.candidate_topk_blocks > 0, "candidate_topk_blocks takes an integer of at least 1, or -1 for none, not 0")


def _check_experts(c: "ModelConfig", rule: _Rules) -> None:
    rule(c.n_shared_experts == 1, f"n_shared_experts takes 1, not {c.n_shared_experts}")
    _check_routing("num_experts_per_tok", c.num_experts_per_tok, "n_routed_experts", c.n_routed_experts, rule)
    rule(c.scoring_func == "sqrtsoftplus", f'scoring_func takes "sqrtsoftplus", not {c.scoring_func!r}')
    rule(c.topk_method == "noaux_tc", f'topk_method takes "noaux_tc", not {c.topk_method!r}')
    rule(c.norm_topk_prob, "norm_topk_prob takes true: routing weights are normalised")
    rule.multiple("hidden_size", c.hidden_size, 32, "the FP4 blocks of the experts")
    rule.multiple("moe_intermediate_size", c.moe_intermediate_size, 32, "the FP4 blocks of the experts")


def _check_routing(chosen_name: str, chosen: int, experts_name: str, experts: int, rule: _Rules) -> None:
    rule(chosen <= experts, f"{chosen_name} takes at most {experts} ({experts_name}), not {chosen}")


def _check_engram(c: "ModelConfig", rule: _Rules) -> None:
    rule.layer_ids("engram_layer_ids", c.engram_layer_ids, c.num_hidden_layers)
    layers, tables = len(c.engram_layer_ids), len(c.engram_num_embeddings)
    rule(layers == tables, f"engram_num_embeddings takes {layers} entries (engram_layer_ids), not {tables}")
    for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
        rule.present(name, getattr(c, name), "engram_layer_ids names layers")
    size = c.engram_max_ngram_size
    rule(size >= 2, f"engram_max_ngram_size takes an integer of at least 2 (engram_layer_ids names layers), not {size}")
    rule.multiple("engram_head_dim", c.engram_head_dim, 32, "the FP8 blocks of a table row")
    classes = c.engram_compressed_vocab_size
    rule(classes <= c.vocab_size, f"engram_compressed_vocab_size takes at most vocab_size = {c.vocab_size}: {classes}")
    least = (size - 1) * c.engram_n_heads * c.engram_vocab_size
    smallest = min(c.engram_num_embeddings)
    rule(
        smallest >= least,
        f"engram_num_embeddings takes at least {least} rows a layer (n-gram sizes * engram_n_heads * "
        f"engram_vocab_size), not {smallest}",
    )


def _check_draft(c: "ModelConfig", rule: _Rules) -> None:
    rule.layer_ids("dspark_target_layer_ids", c.dspark_target_layer_ids, c.num_hidden_layers)
    for name in (
        "dspark_block_size",
        "dspark_markov_rank",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
    ):
        rule.present(name, getattr(c, name), f"num_nextn_predict_layers is {c.num_nextn_predict_layers}")
    chosen, experts = c.dspark_num_experts_per_tok, c.dspark_n_routed_experts
    _check_routing("dspark_num_experts_per_tok", chosen, "dspark_n_routed_experts", experts, rule)


def _check_vision(v: "VisionConfig", rule: _Rules) -> None:
    rule.multiple("vision_config: hidden_size", v.hidden_size, 4 * v.num_attention_heads, "2-D RoPE in every head")
    rule(v.max_image_tokens >= 4, f"vision_config: max_image_tokens takes at least 4, not {v.max_image_tokens}")
