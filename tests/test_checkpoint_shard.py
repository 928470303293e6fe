"""One mapped safetensors file: what it gives, that it stays lazy, and every way in which it can be broken."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer.checkpoint.shard import DTYPES, Shard
from deepinfer.core.errors import CheckpointError


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(7, 5, generator=generator)
    return {
        "f32": floats,
        "bf16": floats.bfloat16(),
        "e4m3": floats.to(torch.float8_e4m3fn),
        "i8": (floats * 50).to(torch.int8),
        "e8m0": torch.arange(1, 8, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def test_gives_what_the_safetensors_package_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(sample(), path, metadata={"format": "pt"})
    shard = Shard(path)
    assert set(shard.entries) == set(sample())
    for name, expected in load_file(path).items():
        found = shard.tensor(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.contiguous().view(-1).view(torch.uint8).tolist() == expected.view(-1).view(torch.uint8).tolist()


def test_every_stored_dtype_is_known() -> None:
    assert set(DTYPES.values()) >= {tensor.dtype for tensor in sample().values()}


def test_tensors_that_are_not_aligned_are_read_too(tmp_path: Path) -> None:
    header = {"a": entry("I8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}
    for padding in range(4):  # one of these puts b at a multiple of four, the others do not
        text = json.dumps(header).encode() + b" " * padding
        shard = Shard(write(tmp_path / f"{padding}", text, b"\7" + struct.pack("<2f", 1.5, -2.0)))
        assert shard.tensor("b").tolist() == [1.5, -2.0]
        assert shard.tensor("b").data_ptr() % 4 == 0
        assert shard.tensor("a").tolist() == [7]


def test_writing_into_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(sample(), path)
    Shard(path).tensor("f32").zero_()
    assert torch.equal(Shard(path).tensor("f32"), sample()["f32"])


def test_a_tensor_outlives_its_shard(tmp_path: Path) -> None:
    save_file(sample(), tmp_path / "a.safetensors")
    tensor = Shard(tmp_path / "a.safetensors").tensor("f32")
    (tmp_path / "a.safetensors").unlink()
    assert torch.equal(tensor, sample()["f32"])


def test_unknown_dtypes_do_not_spoil_the_rest(tmp_path: Path) -> None:
    header = {"a": entry("I64", [1], 0, 8), "b": entry("F32", [1], 8, 12)}
    shard = Shard(write(tmp_path / "a", header, bytes(12)))
    assert shard.entries["a"].dtype == "I64"
    assert shard.tensor("b").tolist() == [0.0]


BROKEN: dict[str, tuple[Any, bytes, str]] = {
    "data cut short": ({"a": entry("F32", [2], 0, 8)}, bytes(5), r"is cut short: its header describes \d+ bytes"),
    "data too long": ({"a": entry("F32", [2], 0, 8)}, bytes(9), "has bytes that belong to no tensor"),
    "header no JSON": (b"{'a'", b"", "header cannot be understood"),
    "header a list": ([1], b"", "header cannot be understood"),
    "entry no object": ({"a": 3}, b"", "header cannot be understood"),
    "entry without shape": ({"a": {"dtype": "F32", "data_offsets": [0, 0]}}, b"", "header cannot be understood"),
    "range and shape differ": ({"a": entry("F32", [3], 0, 8)}, bytes(8), r"bytes \[0, 8\] do not fit F32 \[3\]"),
    "range backwards": ({"a": entry("I64", [1], 8, 0)}, bytes(8), r"bytes \[8, 0\] do not fit"),
    "range before the data": ({"a": entry("I8", [4], -4, 0)}, b"", r"bytes \[-4, 0\] do not fit"),
}


@pytest.mark.parametrize(("header", "data", "message"), BROKEN.values(), ids=BROKEN)
def test_a_malformed_file_is_one_error(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=f"^{path}: .*{message}"):
        Shard(path)


@pytest.mark.parametrize("length", [0, 3, 8, 200])
def test_a_file_cut_inside_its_header_is_one_error(tmp_path: Path, length: int) -> None:
    save_file(sample(), tmp_path / "whole")
    path = tmp_path / "cut.safetensors"
    path.write_bytes((tmp_path / "whole").read_bytes()[:length])
    with pytest.raises(CheckpointError, match=f"is cut short or no safetensors file: {length} bytes"):
        Shard(path)


def test_a_file_of_another_kind_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "page.safetensors"
    path.write_text("<!doctype html><html>not found</html>")
    with pytest.raises(CheckpointError, match="is cut short or no safetensors file"):
        Shard(path)


def test_an_absent_file_and_a_directory_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: cannot be read \(No such file"):
        Shard(tmp_path / "gone.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory"):
        Shard(tmp_path)
