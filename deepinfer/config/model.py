"""What a checkpoint's `config.json` says about the model: every dimension and every layer schedule."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from deepinfer.config.fields import Above, Count, Ids, NonNegative, Positive, Size, Sizes, TokenId, read_fields, section
from deepinfer.config.rules import check_encodings, check_model
from deepinfer.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and the image preprocessing; sizes in channels, patches in pixels."""

    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    patch_size: Size
    rope_theta: Positive = 10000.0
    downsample_ratio: Size
    max_image_tokens: Size
    min_pixels: Count
    max_wh_ratio: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN frequency interpolation of the compressed layers."""

    factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    original_max_position_embeddings: Size


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A checked model configuration; attributes are spelled as the keys of `text_config`.

    Layer numbers below `num_hidden_layers` are the target's; `compress_ratios` goes on with the draft stages.
    A model without Engram has no `engram_layer_ids`, one without a drafter 0 `num_nextn_predict_layers`, one
    without images no `vision`; what belongs to an absent part is 0 or empty.
    """

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    max_position_embeddings: Size
    rms_norm_eps: NonNegative
    bos_token_id: TokenId
    eos_token_id: TokenId
    pad_token_id: TokenId
    image_token_id: TokenId | None = None
    vision: VisionConfig | None = None

    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    qk_rope_head_dim: Size
    q_lora_rank: Size
    o_lora_rank: Size
    o_groups: Size
    sliding_window: Size
    rope_theta: Positive
    compress_rope_theta: Positive
    rope_scaling: RopeScaling | None = None
    compress_ratios: Ids
    kv_source_layer_ids: Ids
    index_source_layer_ids: Ids
    index_n_heads: Size
    index_head_dim: Size
    index_topk: Size
    candidate_source_layer_id: Annotated[int, Above(-1)] = -1
    candidate_topk_blocks: Annotated[int, Above(-1)] = -1
    candidate_block_size: Size = 1

    moe_intermediate_size: Size
    n_routed_experts: Size
    n_shared_experts: Size
    num_experts_per_tok: Size
    scoring_func: str
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: Positive
    swiglu_limit: Positive

    hc_mult: Size
    hc_sinkhorn_iters: Size
    hc_eps: NonNegative

    engram_layer_ids: Ids = ()
    engram_num_embeddings: Sizes = ()
    engram_max_ngram_size: Count = 0
    engram_vocab_size: Count = 0
    engram_n_heads: Count = 0
    engram_head_dim: Count = 0
    engram_pad_token_id: Count = 0
    engram_compressed_vocab_size: Count = 0

    num_nextn_predict_layers: Count = 0
    dspark_block_size: Count = 0
    dspark_noise_token_id: Count = 0
    dspark_target_layer_ids: Ids = ()
    dspark_markov_rank: Count = 0
    dspark_n_routed_experts: Count = 0
    dspark_num_experts_per_tok: Count = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> "ModelConfig":
        """The configuration in a parsed `config.json`; `where` names its origin in errors.

        Special token ids stand beside `text_config` or in it. Raises ConfigError for a missing key, a wrong type
        or a broken rule; keys that the model does not need are ignored.
        """
        text = section(data, "text_config", where)
        if text is None:
            raise ConfigError(f"{where}: text_config is missing; it takes an object with the language model's keys")
        inside = f"{where}: text_config"
        tokens = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")
        above = {key: data[key] for key in tokens if data.get(key) is not None}
        merged = {**text, **above}
        values = read_fields(cls, {"engram_pad_token_id": merged.get("pad_token_id"), **merged}, inside)
        rope, vision = section(text, "rope_scaling", inside), section(data, "vision_config", where)
        if rope is not None:
            values["rope_scaling"] = RopeScaling(**read_fields(RopeScaling, rope, f"{inside}: rope_scaling"))
        if vision is not None:
            values["vision"] = VisionConfig(**read_fields(VisionConfig, vision, f"{where}: vision_config"))
        check_encodings(data, rope, where)
        config = cls(**values)
        check_model(config, where)
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """The configuration in a `config.json`. Raises ConfigError, also where the file is no readable JSON object."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); a checkpoint holds a config.json") from error
        except ValueError as error:
            raise ConfigError(f"{path}: is not valid JSON ({error})") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: takes a JSON object, not {type(data).__name__}")
        return cls.from_dict(data, str(path))

    @property
    def draft_stages(self) -> int:
        """Stages of the drafter (`mtp.0` onwards); 0 for a model without one."""
        return self.num_nextn_predict_layers

    @property
    def decoder_start(self) -> int:
        """First layer of the decoder half: the last KV source, whose compressed KV all decoder layers read."""
        return self.kv_source_layer_ids[-1]

    @property
    def candidates_enabled(self) -> bool:
        """Whether index layers after the candidate source search only in the blocks that it kept."""
        return self.candidate_source_layer_id != -1 and self.candidate_topk_blocks != -1

    def ratio(self, layer: int) -> int:
        """Tokens per compressed position: 0 (window only), 1 or 2. Draft stages follow the target's layers."""
        return self.compress_ratios[layer]

    def has_engram(self, layer: int) -> bool:
        """Whether the layer starts with an n-gram lookup."""
        return layer in self.engram_layer_ids

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV this one reads (itself, if a source), or None for a window-only layer."""
        return _latest(self.kv_source_layer_ids, layer) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection this one uses (itself, if it selects), or None for a window-only layer."""
        return _latest(self.index_source_layer_ids, layer) if self.ratio(layer) else None

    def selects_candidates(self, layer: int) -> bool:
        """Whether this index layer only scores positions in the blocks that the candidate source kept.

        Kept blocks count the candidate source's own compressed positions, so a later KV source starts afresh.
        """
        source = self.candidate_source_layer_id
        return self.candidates_enabled and layer > source and self.kv_source(layer) == source


def _latest(sources: tuple[int, ...], layer: int) -> int:
    """The last of the ascending `sources` at or before `layer`; the model's rules guarantee that there is one."""
    return max(source for source in sources if source <= layer)
