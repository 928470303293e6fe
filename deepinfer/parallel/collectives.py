"""Exchanges of tensors among ranks: gloo on CPUs, NCCL on GPUs, and gloo beside it for numbers of the host."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from deepinfer.config.envs import set_variable

dist: Any = torch.distributed  # process groups are used as objects, without a default one; torch has no types for that
LONGEST_WAIT = timedelta(minutes=10)
"""A last resort: that a rank is gone is noticed within a second by other means."""

LONGEST_MEETING = timedelta(seconds=60)
"""For connecting, which nothing can break off; all ranks are there when it begins."""


_LOOK = timedelta(seconds=1)
"""How long to wait for an exchange before a look whether it was broken off."""

_FIRST_BYTES = 1 << 14
"""Of a message: as much as it takes to say what a step of decoding is."""


class Collectives:
    """One rank's end. Every rank calls the same methods in the same order; one thread at a time."""

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, local: bool, wait: timedelta = LONGEST_WAIT
    ) -> None:
        """Meet the other ranks in `store`. `local`: all ranks are on this machine."""
        self.rank, self.size, self._aborted = rank, size, False
        self._host = _gloo(dist.PrefixStore("host", store), rank, size, local, wait)
        self._data = self._host
        if device.type == "cuda":
            # Exchanges gain nothing by NVLink multicast; that a rank is gone is for `Ranks` to notice, not for NCCL.
            set_variable("NCCL_NVLS_ENABLE", "0")
            set_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            self._data = dist.ProcessGroupNCCL(dist.PrefixStore("data", store), rank, size, _nccl_options(wait))

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of all ranks' numbers, place by place."""
        numbers = torch.tensor(values, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._end(self._host, self._host.allreduce([numbers], options))
        return [int(number) for number in numbers.tolist()]

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' int64 tensors, which lie on the host."""
        summed = values.clone()
        self._end(self._host, self._host.allreduce([summed]))
        return summed

    def swap(self, values: Tensor) -> Tensor:
        """Row r of `values` [ranks, ...] goes to rank r; returns what came, row by source. On the device."""
        result = torch.empty_like(values)
        self._end(self._data, self._data.alltoall_base(result, values.contiguous(), [], []))
        return result

    def send_rows(self, rows: Tensor, counts: Sequence[int], coming: Sequence[int]) -> Callable[[], Tensor]:
        """Send `rows` [P, ...], those for rank 0 first and `counts` for each; returns what waits for those that come.

        They come in the order of their sources, `coming` from each. Between the call and the wait others may compute.
        """
        result = rows.new_empty(sum(coming), *rows.shape[1:])
        sent, got = rows.contiguous().view(torch.uint8), result.view(torch.uint8)
        work = self._data.alltoall_base(got, sent, list(coming), list(counts))

        def wait() -> Tensor:
            self._end(self._data, work)
            return result

        return wait

    def gather(self, rows: Tensor, most: int) -> Tensor:
        """All ranks' rows [n, ...] of at most `most`, one rank's after the other's: [ranks * most, ...]."""
        sent = rows.contiguous()
        if len(rows) < most:  # what fills up is never looked at
            sent = rows.new_empty(most, *rows.shape[1:])
            sent[: len(rows)] = rows
        result = sent.new_empty(self.size * most, *sent.shape[1:])
        self._end(self._data, self._data._allgather_base(result.view(torch.uint8), sent.view(torch.uint8)))
        return result

    def spread(self, values: Tensor) -> None:
        """Rank 0's contiguous tensor, to all; the others give one of its shape, which is written over."""
        if values.numel():
            self._end(self._data, self._data.broadcast([values.view(torch.uint8)]))

    def tell(self, message: bytes | None = None) -> bytes:
        """Rank 0's message, to all; the others give none."""
        first, rest = torch.empty(_FIRST_BYTES, dtype=torch.uint8), b""
        if message is not None:
            size = len(message).to_bytes(8, "little")
            first.numpy()[: 8 + len(message)] = np.frombuffer((size + message)[:_FIRST_BYTES], dtype=np.uint8)
        self._end(self._host, self._host.broadcast([first]))
        told = first.numpy().tobytes()
        size_told = int.from_bytes(told[:8], "little")
        if 8 + size_told > _FIRST_BYTES:
            more = torch.empty(8 + size_told - _FIRST_BYTES, dtype=torch.uint8)
            if message is not None:
                more.numpy()[:] = np.frombuffer(message, dtype=np.uint8)[_FIRST_BYTES - 8 :]
            self._end(self._host, self._host.broadcast([more]))
            rest = more.numpy().tobytes()
        return (told + rest)[8 : 8 + size_told]

    def _end(self, group: Any, work: Any) -> None:
        """Wait for an exchange of a group. One that gloo begins while it is broken off may never end by itself."""
        if group is not self._host:
            work.wait()
            return
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                if self._aborted:
                    raise RuntimeError("the exchange was broken off") from None

    def abort(self) -> None:
        """End whatever runs, here and (since connections close) at the others; nothing can be called after it."""
        self._aborted = True
        for group in {id(one): one for one in (self._data, self._host)}.values():
            group.abort()


def _gloo(store: Any, rank: int, size: int, local: bool, wait: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    make = dist.ProcessGroupGloo.create_device
    options._devices = [make(hostname="127.0.0.1") if local else dist.ProcessGroupGloo.create_default_device()]
    options._timeout = min(wait, LONGEST_MEETING)
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(wait)
    return group


def _nccl_options(wait: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait
    return options
