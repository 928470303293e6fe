"""Reads a checkpoint in the released layout: any subset of its tensors, and nothing that is not asked for."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.checkpoint.formats import dequantize_fp4_rows, dequantize_fp8_blocks, dequantize_fp8_rows
from deepinfer.checkpoint.layout import Storage, TensorSpec, scale_name, tensor_layout
from deepinfer.checkpoint.shard import DTYPES, Shard
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import CheckpointError

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PROBLEMS_SHOWN = 5
DEQUANTIZE = {
    Storage.FP8_BLOCKS: dequantize_fp8_blocks,
    Storage.FP4_ROWS: dequantize_fp4_rows,
    Storage.FP8_ROWS: dequantize_fp8_rows,
}


class Checkpoint:
    """A checkpoint directory: `config.json` and safetensors shards, with an index or as one `model.safetensors`.

    Opening reads the configuration and the index. A shard's header is read when a tensor in it is first needed, a
    tensor's bytes when they are used. Raises CheckpointError, or ConfigError for a configuration that breaks a rule.

    Attributes:
        directory: where it lies.
        config: its checked configuration.
        layout: every tensor that it must hold, by name.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            fault = "is no directory" if self.directory.exists() else "does not exist"
            raise CheckpointError(f"{self.directory}: {fault}; a checkpoint is a directory with a {CONFIG_FILE}")
        if not (self.directory / CONFIG_FILE).is_file():
            raise CheckpointError(f"{self.directory}: holds no {CONFIG_FILE}; it is no checkpoint, or half of one")
        self.config = ModelConfig.from_file(self.directory / CONFIG_FILE)
        self.layout = tensor_layout(self.config)
        self._shards: dict[str, Shard] = {}
        self._index = self.directory / INDEX_FILE
        self._files = self._read_index()

    def check(self) -> None:
        """Compare every shard's header with the layout; CheckpointError names what is missing, unexpected or wrong."""
        problems = list(self._problems())
        if problems:
            shown = "; ".join(problems[:_PROBLEMS_SHOWN])
            more = f"; and {len(problems) - _PROBLEMS_SHOWN} more" if len(problems) > _PROBLEMS_SHOWN else ""
            raise CheckpointError(f"{self.directory}: does not fit its {CONFIG_FILE}: {shown}{more}")

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Tensor `name` in its logical shape, dequantised and then rounded to `dtype`; owned by the caller."""
        stored, scale = self.load_raw(name)
        if scale is None:
            return stored.to(dtype, copy=True)
        return DEQUANTIZE[self.layout[name].storage](stored, scale).to(dtype)

    def load_stacked(self, names: Sequence[str], dtype: torch.dtype = torch.float32) -> Tensor:
        """Tensors of one shape, such as one matrix of every expert, as [len(names), *shape]."""
        stacked = torch.empty((len(names), *self._spec(names[0]).shape), dtype=dtype)
        for row, name in zip(stacked, names, strict=True):
            row.copy_(self.load(name, dtype))
        return stacked

    def load_raw(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Tensor `name` as stored and its scales (None if not quantised), as views of the mapped file.

        Indexing a view reads only what it touches: so a few rows of a table can be had without the table.
        """
        spec = self._spec(name)
        for problem in self._tensor_problems(name, spec):
            raise CheckpointError(f"{self.directory}: {problem}")
        scale = self._stored(scale_name(name)) if spec.storage.quantized else None
        return self._stored(name), scale

    def _spec(self, name: str) -> TensorSpec:
        if name not in self.layout:
            raise CheckpointError(f"{self.directory}: a model of this configuration has no tensor {name}")
        return self.layout[name]

    def _stored(self, name: str) -> Tensor:
        return self._shard(self._files[name]).tensor(name)

    def _shard(self, file: str) -> Shard:
        if file not in self._shards:
            self._shards[file] = Shard(self.directory / file)
        return self._shards[file]

    def _read_index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        path = self._index
        if not path.exists():
            if not (self.directory / SINGLE_FILE).is_file():
                raise CheckpointError(
                    f"{self.directory}: holds neither {INDEX_FILE} nor {SINGLE_FILE}; weights are missing"
                )
            return dict.fromkeys(self._shard(SINGLE_FILE).entries, SINGLE_FILE)
        try:
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            plain = all(isinstance(file, str) and Path(file).name == file for file in files.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: is broken; it takes a JSON object with a weight_map ({error!r})") from error
        if not plain:
            raise CheckpointError(f"{path}: weight_map takes names of files beside it")
        return dict(files)

    def _problems(self) -> Iterator[str]:
        expected = set(self.layout)
        expected.update(scale_name(name) for name, spec in self.layout.items() if spec.storage.quantized)
        for name in sorted(self._files.keys() - expected):
            yield f"unexpected tensor {name} in {self._files[name]}"
        for file in sorted(set(self._files.values())):
            unlisted = sorted(name for name in self._shard(file).entries if self._files.get(name) != file)
            yield from (f"unexpected tensor {name} in {file}, which the index does not list there" for name in unlisted)
        for name, spec in self.layout.items():
            yield from self._tensor_problems(name, spec)

    def _tensor_problems(self, name: str, spec: TensorSpec) -> Iterator[str]:
        """What is wrong with one tensor and its scales, by the headers."""
        accepted = [spec.stored_dtype] if spec.storage.quantized else [torch.bfloat16, torch.float32]
        yield from self._entry_problems(name, accepted, spec.stored_shape)
        if spec.storage.quantized:
            yield from self._entry_problems(scale_name(name), [torch.float8_e8m0fnu], spec.scale_shape)

    def _entry_problems(self, name: str, dtypes: list[torch.dtype], shape: tuple[int, ...]) -> Iterator[str]:
        file = self._files.get(name)
        if file is None:
            yield f"tensor {name} is missing from {INDEX_FILE if self._index.exists() else SINGLE_FILE}"
            return
        entry = self._shard(file).entries.get(name)
        if entry is None:
            yield f"tensor {name} is missing from {file}, where the index puts it"
            return
        if entry.shape != shape:
            yield f"tensor {name} in {file} has shape {list(entry.shape)}; the configuration takes {list(shape)}"
        if DTYPES.get(entry.dtype) not in dtypes:
            names = " or ".join(key for key, dtype in DTYPES.items() if dtype in dtypes)
            yield f"tensor {name} in {file} has dtype {entry.dtype}; it takes {names}"
