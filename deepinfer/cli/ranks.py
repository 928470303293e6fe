"""What one rank of many holds, and what it sends to the others."""

import re
from collections.abc import Mapping
from dataclasses import replace

from deepinfer.cache.layout import CacheLayout
from deepinfer.checkpoint.layout import TensorSpec
from deepinfer.config.model import ModelConfig
from deepinfer.parallel.placement import first_placement
from deepinfer.parallel.tables import rows_each
from deepinfer.parallel.topology import Topology

_EXPERT = re.compile(r"layers\.\d+\.ffn\.experts\.(\d+)\.")
_TABLE = re.compile(r"layers\.\d+\.engram\.embed\.")
_NUMBER, _BF16 = 4, 2
"""Bytes of a slot, of a routing weight and of a row's scale; and of a result's number."""


def rank_layout(
    layout: Mapping[str, TensorSpec], config: ModelConfig, topology: Topology, extra: int, tables_on_host: bool
) -> dict[str, TensorSpec]:
    """The tensors on the device of rank 0, which holds as much as any."""
    held = set(range(config.n_routed_experts))
    if topology.ep > 1:
        held = set(first_placement(config.n_routed_experts, extra, topology.ep).experts[0].tolist())
    own: dict[str, TensorSpec] = {}
    for name, spec in layout.items():
        expert = _EXPERT.match(name)
        if expert is not None and int(expert[1]) not in held:
            continue
        if _TABLE.match(name) is None:
            own[name] = spec
        elif not tables_on_host:
            rows, width = spec.shape
            own[name] = replace(spec, shape=(rows_each(rows, topology.ep), width))
    return own


def group_bytes(config: ModelConfig, rows: int, topology: Topology) -> dict[str, int]:
    """Bytes that leave a rank for those that share prompts with it, in a prefill step of `rows` rows of the group.

    Of its rows all others get the encoder half's window keys and the sources' compressed entries, as stored.
    """
    if topology.cp == 1:
        return {}
    layout = CacheLayout.from_config(config)
    row = config.decoder_start * layout.window_row + layout.bytes_per_token
    return {"KV to the group": round(rows * row * (topology.cp - 1) / topology.cp)}


def wire_bytes(config: ModelConfig, rows: int, layers: int, ranks: int, tables_on_host: bool) -> dict[str, int]:
    """Bytes that leave a rank in a step of `rows` rows through `layers` layers, if experts are chosen evenly.

    Rows go in FP8, once to each other rank that holds an expert they chose; each choice's result comes back in BF16.
    """
    visits = config.num_experts_per_tok
    away = 1 - 1 / ranks
    parcels = (ranks - 1) * (1 - away**visits)
    parcel = config.hidden_size + _NUMBER + 2 * _NUMBER * visits
    sent = {
        "rows to experts": round(rows * layers * parcels * parcel),
        "results of experts": round(rows * layers * visits * away * config.hidden_size * _BF16),
    }
    if config.engram_layer_ids and not tables_on_host:
        lookups = (config.engram_max_ngram_size - 1) * config.engram_n_heads * len(config.engram_layer_ids)
        row = config.engram_head_dim + config.engram_head_dim // 32
        sent["Engram rows and keys"] = round(rows * lookups * away * (row + 8))
    return sent
