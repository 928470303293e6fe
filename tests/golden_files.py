"""Golden data in the layout of `scripts/check_golden.py`, made from the reference itself: other shapes, and faults."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from random_models import build, prompt
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.writer import write_checkpoint
from deepinfer.reference.indexer import Ties
from deepinfer.reference.loading import load_reference, state
from deepinfer.reference.model import ReferenceModel, Trace

LENGTHS = (1, 4, 13, 30)
TRACED = 13
KEEP = 7


def write(directory: Path, data: dict[str, Any], lengths: Iterable[int] = LENGTHS) -> ReferenceModel:
    """Write a random model of this configuration, which has no Engram, and its values; returns the model as stored."""
    model = build(data)
    write_checkpoint(directory / "checkpoint", data, state(model))
    model = load_reference(Checkpoint(directory / "checkpoint"), ties=Ties.TOPK)
    texts: dict[str, Tensor] = {}
    replays: dict[str, Tensor] = {}
    drafts: dict[str, Tensor] = {}
    for length in lengths:
        name, ids = f"text{length}", prompt(model, length, seed=length)
        out = model(ids)
        texts |= {f"{name}.ids": ids[0], f"{name}.logits": out.logits[0], f"{name}.features": out.features[0]}
        if length > KEEP:
            cut = model(ids, replay_start=torch.tensor([length - KEEP]), compact=True)
            replays[f"{name}_keep{KEEP}.logits"] = cut.logits[0]
            replays[f"{name}_keep{KEEP}.features"] = cut.features[0]
        if model.config.draft_stages:
            block = model.draft(ids[0], out.features[0], torch.tensor([length - 1]))
            parts = zip(("tokens", "base_logits", "logits", "confidence_logits"), block, strict=True)
            drafts |= {f"{name}.{part}": tensor[0] for part, tensor in parts}
    traces = _trace(model, texts[f"text{TRACED}.ids"]) if TRACED in lengths else {}
    for name, tensors in (("text", texts), ("replay", replays), ("dspark", drafts), (f"trace{TRACED}", traces)):
        if tensors:
            _save(tensors, directory / f"{name}_fp32.safetensors")
    return model


def _trace(model: ReferenceModel, ids: Tensor) -> dict[str, Tensor]:
    seen = Trace()
    model(ids[None], trace=seen)
    tensors = {f"streams_into_layer{layer}": x[0] for layer, x in enumerate(seen.streams)}
    tensors |= {f"attention_out{layer}": x[0] for layer, x in enumerate(seen.attention)}
    tensors |= {f"compressed_kv{layer}": shared.latents[0] for layer, shared in seen.shared.items()}
    tensors |= {f"index_keys{layer}": shared.keys[0] for layer, shared in seen.shared.items()}
    return tensors | {f"selected{layer}": selected[0] for layer, selected in seen.selected.items()}


def edit(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a file in place."""
    tensors = load_file(path)
    change(tensors)
    _save(tensors, path)


def grids(directory: Path, entries: dict[str, list[list[Any]]]) -> None:
    (directory / "image_grids.json").write_text(json.dumps(entries), encoding="utf-8")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
