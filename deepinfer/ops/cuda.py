"""CUDA C++ kernels: built from `csrc/` by nvcc when first needed, kept by content, loaded as plain libraries."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer.core.errors import ConfigError

SOURCES = Path(__file__).resolve().parent.parent.parent / "csrc"
BUILT = SOURCES / "build"
"""Where libraries are kept; one that lies there under the right name is not built again."""
_HEADERS = ("common.cuh", "wgmma.cuh")
_FLAGS = ("-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
LIBRARIES = (
    ("experts", ()),
    ("experts", ("-DCLUSTER=2",)),
    ("sparse_attention", ()),
    ("select", ()),
    ("index_scores", ()),
)
"""Every library: its source and its own flags."""


@cache
def library(name: str, *flags: str) -> ctypes.CDLL:
    """The library of `csrc/NAME.cu`; ConfigError where it has to be built and nvcc is missing or fails."""
    return ctypes.CDLL(str(build(name, flags)))


def build(name: str, flags: Sequence[str] = ()) -> Path:
    """Compile `csrc/NAME.cu` for SM90a unless that was done before; several processes may do so at once."""
    source, arguments = SOURCES / f"{name}.cu", [*_FLAGS, *flags]
    content = hashlib.sha256(" ".join(arguments).encode())
    for path in (source, *(SOURCES / header for header in _HEADERS)):
        content.update(path.read_bytes())
    target = BUILT / f"{name}_{content.hexdigest()[:16]}.so"
    if not target.exists():
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            raise ConfigError(f"{source.name} has to be compiled, but there is no nvcc on PATH; install CUDA 13's")
        BUILT.mkdir(exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        made = subprocess.run([nvcc, *arguments, source, "-o", part], capture_output=True, text=True)
        if made.returncode:
            raise ConfigError(f"nvcc cannot compile {source}: {made.stderr.strip()[-2000:]}")
        part.replace(target)
    return target


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a contiguous tensor's data lies; null for None."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def stream() -> ctypes.c_void_p:
    """The current stream."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def check(error: int, name: str) -> None:
    """Raise RuntimeError if a launcher did not return 0."""
    if error:
        raise RuntimeError(f"the launch of {name} failed with error {error}")
