"""Results on their way from the device to the host."""

import torch
from torch import Tensor


class Arriving:
    """The copy of a tensor to the host: begun at once, behind what the device has been given so far, and waited for
    when it is read, whatever the device has been given since.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def get(self) -> Tensor:
        """The values, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
