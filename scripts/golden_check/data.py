"""A directory of golden data: its checkpoint, its files, and which of their tensors have been looked at."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.core.errors import CheckpointError
from deepinfer.reference.indexer import Ties
from deepinfer.reference.loading import load_reference
from deepinfer.reference.model import ReferenceModel
from deepinfer.text.engram_classes import check_engram_classes, engram_classes
from deepinfer.text.tokenizer import Tokenizer


class Tensors(dict[str, Tensor]):
    """The tensors of one file by name, none if it is absent; `unread` names those that nobody asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(load_file(path) if path.is_file() else {})
        self.path = path
        self.unread = set(self)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise CheckpointError(f"{self.path}: holds no tensor {name}, which others build on")
        self.unread.discard(name)
        return super().__getitem__(name)

    def cases(self, part: str) -> list[str]:
        """Names of the cases that have this part: of a tensor NAME.part, NAME."""
        return sorted((name.removesuffix(f".{part}") for name in self if name.endswith(f".{part}")), key=_by_number)

    def parts(self, case: str, names: Sequence[str]) -> dict[str, Tensor]:
        """Those of a case's parts that are there."""
        return {name: self[f"{case}.{name}"] for name in names if f"{case}.{name}" in self}


def _by_number(name: str) -> tuple[Any, ...]:
    """Sort text3 before text16."""
    head = name.rstrip("0123456789")
    return head, int(name[len(head) :] or 0)


class Golden:
    """Golden data in `directory`. Raises CheckpointError where there is none, or its checkpoint is not whole."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            fault = "is no directory" if directory.exists() else "does not exist"
            raise CheckpointError(f"{directory}: {fault}; it takes a directory with checkpoint/ and *.safetensors")
        self.directory = directory
        self.checkpoint = Checkpoint(directory / "checkpoint")
        self.checkpoint.check()
        self.config = self.checkpoint.config
        self._files: dict[str, Tensors] = {}

    def file(self, name: str) -> Tensors:
        """The tensors of NAME.safetensors, none if the directory lacks it."""
        if name not in self._files:
            self._files[name] = Tensors(self.directory / f"{name}.safetensors")
        return self._files[name]

    def unread(self) -> list[str]:
        """Files and tensors that nothing has looked at."""
        files = sorted(path.stem for path in self.directory.glob("*.safetensors"))
        whole = [f"{name}.safetensors" for name in files if name not in self._files]
        return whole + [f"{name}: {key}" for name, held in self._files.items() for key in sorted(held.unread)]

    @cached_property
    def classes(self) -> list[int]:
        """Token id -> Engram class, from the checkpoint's own tokenizer."""
        return engram_classes(Tokenizer.from_file(self.checkpoint.directory))

    @cached_property
    def model(self) -> ReferenceModel:
        """The reference in FP32; of equal index scores the one that `torch.topk` takes wins, as in the golden data."""
        classes = None
        if self.config.engram_layer_ids:
            classes = self.classes
            check_engram_classes(classes, self.config, str(self.checkpoint.directory))
        return load_reference(self.checkpoint, classes, ties=Ties.TOPK)
