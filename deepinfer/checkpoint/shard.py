"""One safetensors file, memory-mapped: its header is read at once, a tensor's bytes when they are used.

The mapping reserves no memory, so that a file larger than the machine can be opened. The format: eight bytes with the
header's length, the header (JSON: name -> dtype, shape, byte range), and the data that the ranges count from.
"""

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer.core.errors import CheckpointError

DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
_LENGTH_BYTES = 8
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class Entry:
    """A tensor as the header describes it: dtype by its safetensors name, bytes [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Shard:
    """An open safetensors file. Raises CheckpointError where it is absent, cut short or malformed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                self.entries = _read_header(file.read(_LENGTH_BYTES), file, size, path)
                flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
                self._bytes = mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); the checkpoint is incomplete") from error

    def tensor(self, name: str) -> Tensor:
        """The stored tensor as a view of the mapped file: nothing is read before it is used.

        Writing into it changes neither the file nor other processes' views.
        """
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % dtype.itemsize == 0:
            return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)
        return torch.frombuffer(bytearray(self._bytes[entry.begin : entry.end]), dtype=dtype).view(entry.shape)


def _read_header(length: bytes, file: Any, size: int, path: Path) -> dict[str, Entry]:
    header_bytes = int.from_bytes(length, "little")
    start = _LENGTH_BYTES + header_bytes
    if len(length) < _LENGTH_BYTES or start > size:
        raise CheckpointError(f"{path}: is cut short or no safetensors file: {size} bytes do not hold its header")
    try:
        header = json.loads(file.read(header_bytes))
        entries = {name: _entry(fields, start) for name, fields in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: is no safetensors file: its header cannot be understood ({error})") from error
    end = max((entry.end for entry in entries.values()), default=start)
    if end != size:
        fault = "is cut short" if end > size else "has bytes that belong to no tensor"
        raise CheckpointError(f"{path}: {fault}: its header describes {end} bytes, the file holds {size}")
    return entries


def _entry(fields: dict[str, Any], start: int) -> Entry:
    """An entry of the header; a range that does not fit its shape is a ValueError."""
    begin, end = (start + int(offset) for offset in fields["data_offsets"])
    entry = Entry(str(fields["dtype"]), tuple(int(side) for side in fields["shape"]), begin, end)
    dtype = DTYPES.get(entry.dtype)
    if begin < start or end < begin or (dtype and math.prod(entry.shape) * dtype.itemsize != end - begin):
        raise ValueError(f"bytes {fields['data_offsets']} do not fit {entry.dtype} {list(entry.shape)}")
    return entry
