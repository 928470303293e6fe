"""A checkpoint of the released shape, 510 GB, as sparse files: opened, checked and read in parts in little memory."""

import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from released_config import released

from deepinfer.checkpoint.formats import dequantize_fp8_rows
from deepinfer.checkpoint.layout import TensorSpec, scale_name, tensor_layout
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.config.model import ModelConfig

TABLE = "layers.1.engram.embed.weight"
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}


def shard_of(name: str) -> str:
    """A file for each layer or stage, one more for each Engram table, one for the rest."""
    part = "table-" * name.endswith("engram.embed.weight") + ".".join(name.split(".")[:2])
    return f"{part if name.startswith(('layers.', 'mtp.')) else 'rest'}.safetensors"


def write_sparse(path: Path, tensors: dict[str, TensorSpec]) -> dict[str, int]:
    """A shard whose data is a hole in the file; returns where each stored tensor begins."""
    header, position = {}, 0
    for name, spec in tensors.items():
        parts = [(name, NAMES[spec.stored_dtype], spec.stored_shape, spec.stored_dtype.itemsize)]
        if spec.storage.quantized:
            parts.append((scale_name(name), "F8_E8M0", spec.scale_shape, 1))
        for stored, dtype, shape, item in parts:
            size = item * torch.Size(shape).numel()
            header[stored] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
            position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in header.items()}


def put(file: BinaryIO, offset: int, values: bytes) -> None:
    file.seek(offset)
    file.write(values)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("released")
    (directory / "config.json").write_text(json.dumps(released()))
    shards: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in tensor_layout(ModelConfig.from_dict(released(), "config.json")).items():
        shards.setdefault(shard_of(name), {})[name] = spec
    weight_map = {}
    for file, tensors in shards.items():
        starts = write_sparse(directory / file, tensors)
        weight_map |= dict.fromkeys(starts, file)
        if TABLE in starts:
            with (directory / file).open("r+b") as handle:
                put(handle, starts[TABLE] + 300_000_000 * 256, bytes([0x38] * 256))  # 1.0 in E4M3
                put(handle, starts[scale_name(TABLE)] + 300_000_000 * 8, bytes(range(124, 132)))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_released_size_in_little_memory(directory: Path) -> None:
    files = list(directory.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) > 505e9
    if sum(file.stat().st_blocks * 512 for file in files) > 1e9:
        pytest.skip("this file system makes no sparse files")
    before = resident_bytes()
    checkpoint = Checkpoint(directory)
    checkpoint.check()
    assert checkpoint.load("layers.39.attn.wkv.weight").shape == (512, 5120)
    assert checkpoint.load_stacked([f"mtp.1.ffn.experts.{expert}.w1.weight" for expert in (3, 99)]).shape == (
        2,
        2304,
        5120,
    )

    table, scale = checkpoint.load_raw(TABLE)
    rows = torch.tensor([0, 300_000_000, 384_006_167])
    values = dequantize_fp8_rows(table[rows], scale[rows])
    expected = (2.0 ** torch.arange(-3, 5)).repeat_interleave(32)
    assert torch.equal(values[1], expected)
    assert not values[0].any()
    assert resident_bytes() - before < 600e6, "the table alone is 101 GB"
