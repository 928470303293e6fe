"""What differs from layer to layer, in words."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from deepinfer.config.model import ModelConfig


def schedules(c: ModelConfig) -> dict[str, str]:
    """Role -> the layers that have it."""
    return {
        "compression": ratios(c.compress_ratios[: c.num_hidden_layers]),
        "own compressed KV": listed(c.kv_source_layer_ids),
        "select": listed(c.index_source_layer_ids),
        "Engram": listed(c.engram_layer_ids),
        "feed the drafter": listed(c.dspark_target_layer_ids),
    }


def ratios(per_layer: Sequence[int]) -> str:
    """Runs of equal compression: "0-1 window only, 2-19 ratio 2"."""
    runs, first = [], 0
    for ratio, group in groupby(per_layer):
        last = first + len(list(group)) - 1
        span = f"{first}-{last}" if last > first else f"{first}"
        runs.append(f"{span} ratio {ratio}" if ratio else f"{span} window only")
        first = last + 1
    return ", ".join(runs)


def listed(layers: Iterable[int]) -> str:
    """Layer numbers with commas; "none" for none."""
    return ", ".join(map(str, layers)) or "none"
