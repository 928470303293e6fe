"""Random weights in the stored formats, of the shapes that a configuration asks for: a model to measure, not to ask.

Nothing is read. Tensors are made where they are used, on the device, and each from its own name, so that the order in
which they are asked for does not matter.
"""

from hashlib import blake2b
from math import log2

import torch
from torch import Tensor

from deepinfer.checkpoint.layout import Storage, TensorSpec, tensor_layout
from deepinfer.checkpoint.reader import DEQUANTIZE
from deepinfer.config.model import ModelConfig

_FP4_SPREAD = 2.93  # standard deviation of E2M1 values whose codes are uniform
_FP8_SPREAD = 96.0  # of E4M3 values, whose largest is 448
_SCALE_SIZE = 0.79  # root mean square of scales of which half are 1, half are 1/2
_SCALE_BIAS = 127  # of E8M0
_BIAS_SPREAD = 0.055  # of the router's bias: loads whose logarithm has a standard deviation of about 0.4


class RandomCheckpoint:
    """Takes the place of a `Checkpoint`: the same configuration, layout and ways to read.

    Matrices keep the size of what they multiply: their standard deviation is columns ** -0.5. Norms are 1. The router's
    bias spreads the experts' loads about as trained ones do: the logarithm of a load has standard deviation 0.4.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.config = config
        self.layout = tensor_layout(config, head=Storage.BF16)
        self._device, self._seed = torch.device(device), seed

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Tensor `name`, dequantised and then rounded to `dtype`, on the device."""
        values, scales = self.load_raw(name)
        return (values if scales is None else DEQUANTIZE[self.layout[name].storage](values, scales)).to(dtype)

    def load_raw(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Tensor `name` as stored and its scales (None if not quantised), on the device."""
        spec, generator = self.layout[name], self._generator(name)
        if not spec.storage.quantized:
            return self._plain(name, spec, generator).to(spec.stored_dtype), None
        fp4 = spec.storage is Storage.FP4_ROWS
        size = (_FP4_SPREAD if fp4 else _FP8_SPREAD) * _SCALE_SIZE * spec.shape[-1] ** 0.5
        if fp4:
            codes = torch.randint(-128, 128, spec.stored_shape, generator=generator, device=self._device).to(torch.int8)
        else:
            values = torch.randn(spec.stored_shape, generator=generator, device=self._device) * _FP8_SPREAD
            codes = values.clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = torch.full(spec.scale_shape, _SCALE_BIAS - round(log2(size)), dtype=torch.uint8, device=self._device)
        scales -= torch.randint(0, 2, spec.scale_shape, generator=generator, device=self._device).to(torch.uint8)
        return codes, scales.view(torch.float8_e8m0fnu)

    def _plain(self, name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
        if "norm" in name or name.endswith(("q_weight", "k_weight", "scale")):
            return torch.ones(spec.shape, device=self._device)
        values = torch.randn(spec.shape, generator=generator, device=self._device)
        if name.endswith(("gate.bias", "gate.bias_vl")):
            return values * _BIAS_SPREAD
        return values if len(spec.shape) < 2 or name == "embed.weight" else values * spec.shape[-1] ** -0.5

    def _generator(self, name: str) -> torch.Generator:
        seed = blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        return torch.Generator(self._device).manual_seed(int.from_bytes(seed, "big"))
