"""Writes a checkpoint in the released layout: quantised, sharded, indexed, and either whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.checkpoint.formats import quantize_fp4_rows, quantize_fp8_blocks, quantize_fp8_rows
from deepinfer.checkpoint.layout import Storage, TensorSpec, scale_name, tensor_layout
from deepinfer.checkpoint.reader import CONFIG_FILE, INDEX_FILE
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import CheckpointError

Value = Tensor | tuple[Tensor, Tensor]
"""Logical values, or a quantised tensor as stored with its scales (what `Checkpoint.load_raw` returns)."""

_QUANTIZE = {
    Storage.FP8_BLOCKS: quantize_fp8_blocks,
    Storage.FP4_ROWS: quantize_fp4_rows,
    Storage.FP8_ROWS: quantize_fp8_rows,
}
_HEADER_BASE = 64  # bytes that a shard's header takes without entries, at most
_HEADER_ENTRY = 120  # and those of an entry, its name aside


def write_checkpoint(
    directory: str | Path,
    config_json: Mapping[str, Any],
    tensors: Mapping[str, Value],
    max_shard_bytes: int = 16_000_000,
    extra_files: Iterable[str | Path] = (),
    head: Storage = Storage.F32,
) -> None:
    """Write `tensors` (every tensor of the layout, by name) as the checkpoint `directory`.

    Values are logical and of any float dtype; quantisation happens here, one shard at a time, so `tensors` may make
    its values when asked. No shard file exceeds `max_shard_bytes`. `extra_files` (the tokenizer's) are copied beside
    them. `head` is the storage of `head.weight`, BF16 or F32.

    All is written into a temporary sibling that then takes the directory's place; an earlier checkpoint there is
    replaced, anything else is left alone. Raises ConfigError for a bad configuration, CheckpointError for a tensor
    that is missing, unexpected, misshapen or not finite, or larger than a shard.
    """
    directory = Path(directory).resolve()
    layout = tensor_layout(ModelConfig.from_dict(dict(config_json), f"{directory / CONFIG_FILE} to be written"), head)
    _check_names(directory, layout, tensors)
    _check_target(directory)
    shards = _plan(layout, max_shard_bytes)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _write_shards(partial, shards, layout, tensors)
        (partial / CONFIG_FILE).write_text(json.dumps(config_json, indent=1), encoding="utf-8")
        for file in extra_files:
            shutil.copyfile(file, partial / Path(file).name)
        _replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def stored_form(name: str, spec: TensorSpec, value: Value) -> dict[str, Tensor]:
    """The tensors on disk, on the CPU, of one logical tensor: itself and, if quantised, its scales.

    Raises CheckpointError where the value has another shape or holds NaN or infinity, also after rounding to BF16.
    """
    if isinstance(value, tuple):
        return _given(name, spec, *value)
    if value.shape != spec.shape:
        raise CheckpointError(
            f"tensor {name} has shape {list(value.shape)}; the configuration takes {list(spec.shape)}"
        )
    plain = value.detach().to(torch.float32 if spec.storage.quantized else spec.stored_dtype, copy=True)
    if not bool(torch.isfinite(plain).all()):
        raise CheckpointError(f"tensor {name} holds NaN or infinity as {plain.dtype}; a checkpoint takes finite values")
    if not spec.storage.quantized:
        return {name: plain.cpu().contiguous()}
    codes, scale = _QUANTIZE[spec.storage](plain)
    return {name: codes.cpu(), scale_name(name): scale.cpu()}


def _given(name: str, spec: TensorSpec, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """A tensor that is quantised already, checked against its spec."""
    found = (codes.dtype, tuple(codes.shape), scale.dtype, tuple(scale.shape))
    if not spec.storage.quantized:
        raise CheckpointError(f"tensor {name} takes plain values ({spec.storage.name}), not a pair with scales")
    takes = (spec.stored_dtype, spec.stored_shape, torch.float8_e8m0fnu, spec.scale_shape)
    if found != takes:
        raise CheckpointError(f"tensor {name} with scales takes dtypes and shapes {takes}, not {found}")
    if bool(codes.float().isnan().any() | scale.float().isnan().any()):
        raise CheckpointError(f"tensor {name} holds NaN among its codes or scales; a checkpoint takes finite values")
    return {name: codes.cpu().contiguous(), scale_name(name): scale.cpu().contiguous()}


def _check_names(directory: Path, layout: Mapping[str, TensorSpec], tensors: Mapping[str, Value]) -> None:
    for name in layout:
        if name not in tensors:
            raise CheckpointError(f"{directory}: not written: tensor {name} is missing")
    for name in tensors:
        if name not in layout:
            raise CheckpointError(f"{directory}: not written: tensor {name} is none of this configuration's")


def _check_target(directory: Path) -> None:
    if not directory.exists() or (directory / CONFIG_FILE).is_file():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise CheckpointError(f"{directory}: exists and is no checkpoint; it is not replaced, choose another place")


def _plan(layout: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[list[str]]:
    """Names per shard, in the layout's order; a tensor stays with its scales."""
    shards: list[list[str]] = [[]]
    capacity = room = max_shard_bytes - _HEADER_BASE
    for name, spec in layout.items():
        size = spec.stored_bytes + 2 * (len(name) + _HEADER_ENTRY)
        if size > capacity:
            raise CheckpointError(
                f"tensor {name} needs a shard of {size + _HEADER_BASE} bytes; max_shard_bytes is {max_shard_bytes}"
            )
        if size > room:
            shards.append([])
            room = capacity
        shards[-1].append(name)
        room -= size
    return shards


def _write_shards(
    directory: Path, shards: list[list[str]], layout: Mapping[str, TensorSpec], tensors: Mapping[str, Value]
) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored: dict[str, Tensor] = {}
        for name in names:
            stored |= stored_form(name, layout[name], tensors[name])
        save_file(stored, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file)
        total += sum(tensor.nbytes for tensor in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=0), encoding="utf-8")


def _replace(partial: Path, directory: Path) -> None:
    """Move `partial` to `directory`; what stood there is removed only once the new one is in place."""
    if not directory.exists():
        partial.rename(directory)
        return
    earlier = directory.with_name(f".{directory.name}.earlier-{os.getpid()}")
    directory.rename(earlier)
    partial.rename(directory)
    shutil.rmtree(earlier)
