"""FP32 master weights beside the model's stored-format copies, and the optimiser between them.

The model computes with exactly the values a checkpoint can hold: after every update each parameter is the round trip
of its master through the storage format of its tensor. The straight-through gradient is then no code at all: the
gradient of the copy is applied to the master.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from deepinfer.checkpoint import formats
from deepinfer.checkpoint.layout import Storage, TensorSpec
from deepinfer.reference.loading import stored_names
from deepinfer.reference.model import ReferenceModel


def storages(model: ReferenceModel, layout: dict[str, TensorSpec]) -> dict[str, Storage]:
    """How each parameter is stored, by parameter name."""
    return {name: layout[stored_names(name, len(p))[0]].storage for name, p in model.named_parameters()}


def stored_value(master: Tensor, storage: Storage) -> Tensor:
    """FP32 values of ``master`` after its round trip through ``storage``."""
    match storage:
        case Storage.F32:
            return master
        case Storage.BF16:
            return master.bfloat16().float()
        case Storage.FP8_BLOCKS:
            return formats.fp8_blocks_round_trip(master)
        case Storage.FP8_ROWS:
            return formats.fp8_rows_round_trip(master)
        case Storage.FP4_ROWS:
            return formats.fp4_rows_round_trip(master)


class Masters:
    """Owns the masters, their AdamW state and the writing of the model's parameters."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], storage: dict[str, Storage], device: str, weight_decay: float
    ) -> None:
        """Takes over ``parameters`` (FP32 starting values): they become BF16, or FP32 where stored so."""
        self.storage = storage
        self.masters = {name: p.detach().to(device, torch.float32).clone() for name, p in parameters.items()}
        self.parameters = parameters
        self.lr = torch.zeros((), device=device)
        for name, parameter in parameters.items():
            kept = storage[name] is Storage.F32
            parameter.data = self.masters[name].to(torch.float32 if kept else torch.bfloat16)
        decayed = [master for name, master in self.masters.items() if self._decays(name)]
        plain = [master for name, master in self.masters.items() if not self._decays(name)]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=self.lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=device != "cpu",
            capturable=device != "cpu",
        )
        self.write()

    def _decays(self, name: str) -> bool:
        return self.masters[name].dim() >= 2 and "hc_" not in name and "embed" not in name

    @torch.no_grad()
    def write(self, names: Iterable[str] | None = None) -> None:
        """Bring the model's parameters up to their masters."""
        for name in names if names is not None else self.masters:
            self.parameters[name].copy_(stored_value(self.masters[name], self.storage[name]))

    def step(self, clip: float) -> Tensor:
        """One AdamW update from the parameters' gradients, which are consumed; returns the norm before clipping."""
        names = [name for name, p in self.parameters.items() if p.grad is not None]
        grads = [self.parameters[name].grad.float() for name in names]  # type: ignore[union-attr]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (clip / (norm + 1e-6)).clamp(max=1.0))
        for name, grad in zip(names, grads, strict=True):
            self.masters[name].grad = grad
            self.parameters[name].grad = None
        self.optimizer.step()
        for name in names:
            self.masters[name].grad = None
        self.write(names)
        return norm

    def state(self) -> dict[str, object]:
        """All that a later run needs to go on exactly."""
        return {"masters": self.masters, "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        """Go on from `state`; without optimiser state (a compact copy) the moments start afresh."""
        masters: dict[str, Tensor] = state["masters"]  # type: ignore[assignment]
        with torch.no_grad():
            for name, master in masters.items():
                self.masters[name].copy_(master)
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
        self.write()


@torch.no_grad()
def balance(loads: list[tuple[nn.Module, Tensor]], rate: Tensor) -> None:
    """Move each router's selection biases against its load: ``rate`` up for experts below the mean, down above it.

    Text and image tokens have a bias each. Stands in for a balancing loss, as the architecture's router expects.
    """
    for gate, load in loads:
        for bias, counts in ((gate.bias, load[0]), (gate.bias_vl, load[1])):
            bias.add_(rate * (counts.mean() - counts).sign())
