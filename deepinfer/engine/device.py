"""The torch device of an accelerator name."""

import importlib
import warnings

import torch

from deepinfer.core.errors import ConfigError


def select_device(accelerator: str) -> torch.device:
    """Return the device of `DEEPINFER_ACCELERATOR`'s value; ConfigError if this machine or its torch has none."""
    if accelerator == "cpu":
        return torch.device("cpu")
    if accelerator == "nvidia":
        if not torch.cuda.is_available():
            raise ConfigError(
                "DEEPINFER_ACCELERATOR=nvidia, but torch finds no GPU; check the driver and that torch is a CUDA build "
                f"(this one: {torch.__version__}), or set DEEPINFER_ACCELERATOR=cpu"
            )
        return torch.device("cuda")
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise ConfigError(
            f"DEEPINFER_ACCELERATOR=ascend needs torch_npu ({error}); install it, or set DEEPINFER_ACCELERATOR=cpu"
        ) from error
    warnings.warn("deepinfer has never been run on an Ascend device", RuntimeWarning, stacklevel=2)
    return torch.device("npu")
