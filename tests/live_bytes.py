"""Counts the bytes of tensors that are alive at once."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active, follows every tensor that an operator returns; `peak` is the most bytes alive at once.

    Storages of the tensors in `known` do not count. What an operator allocates inside itself is not seen.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result
