"""A random checkpoint, as small as one can be that has every part: chat, both halves, Engram, vision, drafts."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from deepinfer.checkpoint.layout import TensorSpec, tensor_layout
from deepinfer.checkpoint.writer import write_checkpoint
from deepinfer.config.model import ModelConfig
from deepinfer.text import spellings
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.tokenizer import Tokenizer as ProjectTokenizer


def tokenizer_json() -> str:
    """One token a byte, then the protocol's control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for spelling in spellings.PROTOCOL_SPELLINGS:
        token = AddedToken(spelling.text, special=spelling.special, normalized=spelling.normalized)
        (tokenizer.add_special_tokens if spelling.special else tokenizer.add_tokens)([token])
    return str(tokenizer.to_str())


def config_json(tokenizer: ProjectTokenizer) -> dict[str, Any]:
    """The configuration that fits `tokenizer`."""
    ids = {name: tokenizer.token_id(getattr(spellings, name)) for name in ("BOS", "EOS", "PAD", "IMAGE", "SYSTEM")}
    text = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-20,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "o_groups": 1,
        "sliding_window": 16,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "compress_ratios": [0, 2, 1, 1, 0],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 7.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [640],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 97,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": ids["PAD"],
        "engram_compressed_vocab_size": len(set(engram_classes(tokenizer))),
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_noise_token_id": ids["SYSTEM"],
        "dspark_target_layer_ids": [2, 3],
        "dspark_markov_rank": 8,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
    }
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "patch_size": 4,
        "rope_theta": 10000.0,
        "downsample_ratio": 2,
        "max_image_tokens": 64,
        "min_pixels": 256,
    }
    tokens = {"bos_token_id": ids["BOS"], "eos_token_id": ids["EOS"], "pad_token_id": ids["PAD"]}
    return {**tokens, "image_token_id": ids["IMAGE"], "text_config": text, "vision_config": vision}


def write(directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint and return its directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    json_file = directory.parent / "tokenizer.json"
    json_file.write_text(tokenizer_json(), encoding="utf-8")
    data = config_json(ProjectTokenizer.from_file(json_file))
    layout = tensor_layout(ModelConfig.from_dict(data, "tiny"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, spec, generator) for name, spec in layout.items()}
    write_checkpoint(directory, data, tensors, extra_files=[json_file])
    return directory


def edit_config(directory: Path, section: str | None = "text_config", **keys: Any) -> None:
    """Overwrite keys of a section (None: the top level) in the config.json of `directory`."""
    path = directory / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    (data[section] if section else data).update(keys)
    path.write_text(json.dumps(data), encoding="utf-8")


def _random(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    values = torch.randn(spec.shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * values
    return values * spec.shape[-1] ** -0.5
