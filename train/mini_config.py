"""The small checkpoint's `config.json`: the released architecture with every part present, in small."""

from typing import Any

from deepinfer.reference.engram import primes_from
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.spellings import BOS, EOS, IMAGE, PAD
from deepinfer.text.tokenizer import Tokenizer
from train.tokenised import control_id
from train.vocabulary import NOISE

VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "patch_size": 8,
    "rope_theta": 10000.0,
    "downsample_ratio": 2,
    "max_image_tokens": 64,
    "min_pixels": 1024,
}


def mini_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The nested configuration; token ids and the Engram class count come from the vocabulary."""
    bos, eos, pad, image, noise = (control_id(tokenizer, spelling) for spelling in (BOS, EOS, PAD, IMAGE, NOISE))
    engram_layers, sizes, heads, buckets = [1, 3], 3, 4, 2999
    primes = primes_from(buckets, len(engram_layers) * sizes * heads)
    rows = [sum(primes[i * sizes * heads : (i + 1) * sizes * heads]) for i in range(len(engram_layers))]
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 256,
        "moe_intermediate_size": 160,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "o_groups": 2,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 256,
        },
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0],
        "compress_rope_theta": 160000.0,
        "kv_source_layer_ids": [2, 5],
        "index_source_layer_ids": [2, 5, 7, 9],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 128,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 64,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": engram_layers,
        "engram_num_embeddings": rows,
        "engram_max_ngram_size": sizes + 1,
        "engram_vocab_size": buckets,
        "engram_n_heads": heads,
        "engram_head_dim": 32,
        "engram_pad_token_id": pad,
        "engram_compressed_vocab_size": max(engram_classes(tokenizer)) + 1,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 5,
        "dspark_noise_token_id": noise,
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 64,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
        "dtype": "bfloat16",
        "pad_token_id": pad,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "image_token_id": image,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": VISION,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [32, 32],
        },
    }
