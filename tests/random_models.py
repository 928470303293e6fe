"""Reference models with random weights, in many shapes and schedules."""

from collections.abc import Callable
from typing import Any

import torch
from released_config import ABSENT, edited, golden, small
from torch import Tensor, nn

from deepinfer.checkpoint.layout import Storage, tensor_layout
from deepinfer.config.model import ModelConfig
from deepinfer.reference.indexer import Ties
from deepinfer.reference.loading import state, stored_names
from deepinfer.reference.model import ReferenceModel

# A model that takes milliseconds, with every part: three sources, reindex layers, candidates, Engram, vision, drafts.
TINY = {
    "hidden_size": 64,
    "vocab_size": 120,
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "index_topk": 5,
    "sliding_window": 6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "dspark_n_routed_experts": 4,
    "engram_compressed_vocab_size": 90,
    "engram_layer_ids": [0, 4],
    "dspark_target_layer_ids": [2, 5],
}
NO_ENGRAM = {key: ABSENT for key in golden()["text_config"] if key.startswith("engram_")}


def tiny(**changes: Any) -> dict[str, Any]:
    """The `config.json` of `TINY` with further changes, spelled as for `edited`."""
    return edited(golden(), **{**TINY, **changes})


def without_vision() -> dict[str, Any]:
    data = tiny()
    del data["vision_config"], data["image_token_id"]
    return data


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "all parts": tiny,
    "no Engram": lambda: tiny(**NO_ENGRAM),
    "no vision": without_vision,
    "no draft": lambda: tiny(num_nextn_predict_layers=0, compress_ratios=[0, 2, 2, 1, 1, 1]),
    "one draft stage": lambda: tiny(num_nextn_predict_layers=1, compress_ratios=[0, 2, 2, 1, 1, 1, 0]),
    "candidates off": lambda: tiny(candidate_source_layer_id=-1),
    "candidates of pairs": lambda: tiny(candidate_source_layer_id=1, index_source_layer_ids=[1, 2, 3, 5]),
    "ratio 1 only": lambda: tiny(
        compress_ratios=[1, 1, 1, 1, 1, 1, 0, 0], kv_source_layer_ids=[0], index_source_layer_ids=[0, 2],
        candidate_source_layer_id=0,
    ),
    "ratio 2 only": lambda: tiny(
        compress_ratios=[0, 2, 2, 2, 2, 0, 0, 0], kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3, 4],
    ),
    "two ratio-2 sources": lambda: tiny(
        num_hidden_layers=7, compress_ratios=[2, 2, 2, 2, 0, 1, 1, 0, 0], kv_source_layer_ids=[0, 2, 5],
        index_source_layer_ids=[0, 1, 2, 5, 6], candidate_source_layer_id=5,
    ),
    "hidden 96": lambda: tiny(hidden_size=96, num_attention_heads=6, o_groups=3, head_dim=96, qk_rope_head_dim=8),
    "odd widths": lambda: {**small(), "text_config": {**small()["text_config"], "vocab_size": 130}},
}  # fmt: skip


def build(data: dict[str, Any], seed: int = 0, ties: Ties = Ties.LOWEST) -> ReferenceModel:
    """A model of this configuration with random weights; token ids share Engram classes in turn."""
    config = ModelConfig.from_dict(data, "test")
    classes = [token % max(config.engram_compressed_vocab_size, 1) for token in range(config.vocab_size)]
    model = ReferenceModel(config, classes if config.engram_layer_ids else None, ties)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = _random(name, parameter, generator)
    return model.requires_grad_(False).eval()


def _random(name: str, parameter: nn.Parameter, generator: torch.Generator) -> Tensor:
    values = torch.randn(parameter.shape, generator=generator)
    if "norm" in name or name.endswith(("q_weight", "k_weight")):
        return 1 + 0.2 * values
    if name == "embed.weight" or name.startswith("image_"):
        return values
    if name.endswith(("base", "scale", "bias", "bias_vl", "attn_sink")):
        return 0.3 * values
    return values * parameter.shape[-1] ** -0.5


def tensors(model: ReferenceModel) -> dict[str, Tensor]:
    """The model's tensors under their checkpoint names."""
    return state(model)


def to_bfloat16(model: ReferenceModel) -> ReferenceModel:
    """The model with BF16 weights and activations; what checkpoints store in FP32 stays so, as in `load_reference`."""
    layout = tensor_layout(model.config, head=Storage.BF16)
    for name, parameter in model.named_parameters():
        if layout[stored_names(name, len(parameter))[0]].storage is not Storage.F32:
            parameter.data = parameter.data.bfloat16()
    return model


def prompt(model: ReferenceModel, length: int, seed: int = 0) -> Tensor:
    """Random text ids, int64 [1, length]."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(5, model.config.vocab_size, (1, length), generator=generator)
