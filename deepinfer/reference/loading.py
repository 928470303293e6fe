"""Filling a `ReferenceModel` from a checkpoint, and giving its tensors back under checkpoint names."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.checkpoint.layout import Storage
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.reference.indexer import Ties
from deepinfer.reference.model import ReferenceModel

_EXPERTS = re.compile(r"(.*\.experts)\.(w[123])$")


def stored_names(parameter: str, experts: int) -> list[str]:
    """Checkpoint names of one parameter: one, or one for each of ``experts`` where the parameter stacks them."""
    match = _EXPERTS.match(parameter)
    if match:
        return [f"{match[1]}.{expert}.{match[2]}.weight" for expert in range(experts)]
    return [re.sub(r"hc_(attn|ffn)\.", r"hc_\1_", parameter)]


def load_reference(
    checkpoint: Checkpoint,
    classes: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    ties: Ties = Ties.LOWEST,
) -> ReferenceModel:
    """The model with dequantised weights; ``classes`` as for `ReferenceModel`.

    ``dtype`` is the dtype of activations and of all weights except those that the checkpoint stores in FP32.
    ``ties`` decides between equal index scores.
    """
    model = ReferenceModel(checkpoint.config, classes, ties)
    for name, parameter in model.named_parameters():
        names = stored_names(name, len(parameter))
        kept = checkpoint.layout[names[0]].storage is Storage.F32
        wanted = torch.float32 if kept else dtype
        tensors = [checkpoint.load(stored, wanted) for stored in names]
        parameter.data = torch.stack(tensors) if _EXPERTS.match(name) else tensors[0]
    return model.requires_grad_(False).eval()


def state(model: ReferenceModel) -> dict[str, Tensor]:
    """Every tensor of the model under its checkpoint name, experts apart."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        names = stored_names(name, len(parameter))
        parts = parameter.detach() if _EXPERTS.match(name) else [parameter.detach()]
        tensors.update(zip(names, parts, strict=True))
    return tensors
