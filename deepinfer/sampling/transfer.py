"""Small arrays on their way from the host to the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of `values` on `device`; does not wait for what runs there."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 `values` on `device`."""
    return to_device(np.array(values, dtype=np.int64), device)


def floats(values: Sequence[float] | npt.NDArray[np.float64], device: torch.device) -> Tensor:
    """FP32 `values` on `device`."""
    return to_device(np.array(values, dtype=np.float32), device)
