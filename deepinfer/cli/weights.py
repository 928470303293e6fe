"""What the weights cost, by what they are for."""

import math
import re
from collections.abc import Mapping

from deepinfer.checkpoint.layout import Storage, TensorSpec

ENGRAM_TABLES = "Engram tables"
_PARTS = (
    (r"mtp\.", "drafter"),
    (r".*\.experts\.", "routed experts"),
    (r".*\.shared_experts\.", "shared experts"),
    (r".*\.ffn\.gate\.", "routers"),
    (r".*\.engram\.embed\.", ENGRAM_TABLES),
    (r".*\.engram\.", "Engram projections"),
    (r"layers\.\d+\.attn\.indexer\.", "indexers"),
    (r"layers\.\d+\.attn\.compressor\.", "compressors"),
    (r"layers\.\d+\.attn\.", "attention"),
    (r"layers\.\d+\.hc_", "hyper-connections"),
    (r"(vision|aligner)\.|image_", "vision"),
    (r"(embed|head)\.", "embedding and head"),
    (r".*norm\.", "norms"),
)
_WIDE = re.compile(r".*(norm\d?|gate)\.weight|head\.weight|.*\.[qk]_weight")
"""Stored as BF16 and computed in FP32."""
_FP32 = 4


def part_of(name: str) -> str:
    """The part of the model that tensor `name` belongs to."""
    return next(part for pattern, part in _PARTS if re.match(pattern, name))


def weight_bytes(layout: Mapping[str, TensorSpec]) -> dict[str, int]:
    """Bytes of each part as stored, scales included, the largest first."""
    totals: dict[str, int] = {}
    for name, spec in layout.items():
        part = part_of(name)
        totals[part] = totals.get(part, 0) + spec.stored_bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def resident_bytes(layout: Mapping[str, TensorSpec], activation: int) -> int:
    """Bytes of all weights as the PyTorch operators hold them: the Engram tables as stored, matrices with `activation`
    bytes a number, and norms, gates and whatever is stored as FP32 in FP32.
    """
    return sum(_resident(name, spec, activation) for name, spec in layout.items())


def _resident(name: str, spec: TensorSpec, activation: int) -> int:
    if spec.storage is Storage.FP8_ROWS:
        return spec.stored_bytes
    wide = spec.storage is Storage.F32 or _WIDE.fullmatch(name)
    return math.prod(spec.shape) * (_FP32 if wide else activation)
