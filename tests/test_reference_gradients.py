"""The model is differentiable: which parameters learn from the outputs, and how the roundings let gradients pass."""

from functools import cache

import pytest
import torch
from random_models import build, prompt, tiny
from torch import Tensor

from deepinfer.reference import attention
from deepinfer.reference.model import ReferenceModel
from deepinfer.text.images import ImageGrid, ImageInput, expand_images

# A choice has no gradient: the indexer only chooses positions, and a gate's biases only choose experts.
CHOOSERS = ("indexer.", "gate.bias", "gate.bias_vl")


def loss(model: ReferenceModel) -> Tensor:
    """Something that depends on all outputs, for text with an image and a block drafted after it."""
    patches = torch.randn(30, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    picture = ImageInput(patches, ImageGrid(20, 24, 5, 6, 3, 3))
    image_id = model.config.image_token_id
    text = [token for token in prompt(model, 60)[0].tolist() if token != image_id]
    ids, types = (
        torch.tensor([part]) for part in expand_images([*text[:20], image_id, *text[20:]], [picture.grid], image_id)
    )
    out = model(ids, types, [picture])
    block = model.draft(ids[0], out.features[0].detach(), torch.arange(20, ids.shape[1], 4))
    outputs = (out.logits, out.features, block.logits, block.confidence)
    weights = (torch.randn(part.shape, generator=torch.Generator().manual_seed(i)) for i, part in enumerate(outputs))
    return sum((part * weight).mean() for part, weight in zip(outputs, weights, strict=True))


@cache
def learned() -> dict[str, Tensor | None]:
    """The gradient of every parameter."""
    model = build(tiny(swiglu_limit=10.0))
    for name, parameter in model.named_parameters():
        if name.endswith("gate.bias"):
            parameter.zero_()  # so that some token chooses every expert
    model.requires_grad_(True)
    loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_choosers_get_no_gradient() -> None:
    found = {name: grad for name, grad in learned().items() if any(part in name for part in CHOOSERS)}
    assert len(found) > 10
    assert all(grad is None for grad in found.values())


def test_everything_else_learns() -> None:
    found = {name: grad for name, grad in learned().items() if not any(part in name for part in CHOOSERS)}
    idle = [name for name, grad in found.items() if grad is None or not bool(grad.isfinite().all() & (grad != 0).any())]
    assert idle == []


def test_every_expert_learns() -> None:
    stacked = {name: grad for name, grad in learned().items() if ".experts.w" in name}
    assert len(stacked) == 3 * 8
    for name, grad in stacked.items():
        assert bool((grad.flatten(1) != 0).any(-1).all()), name


def test_an_image_learns_through_its_tokens() -> None:
    assert bool((learned()["vision.patch_embed.proj.weight"] != 0).any())
    assert bool((learned()["image_newline"] != 0).any())


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.hc_attn.scale", "layers.3.attn.attn_sink", "head.weight"])
def test_gradients_are_those_of_finite_differences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along one direction, without roundings, which are steps."""
    for module, function in (("attention", "window_fp8"), ("attention", "latent_nvfp4"), ("indexer", "index_mxfp4")):
        monkeypatch.setattr(f"deepinfer.reference.{module}.{function}", lambda x: x)
    model = build(tiny())
    parameter = dict(model.named_parameters())[name]
    parameter.requires_grad_(True)

    def value() -> Tensor:
        return model(prompt(model, 12)).logits.double().square().mean()

    value().backward()
    direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    slope = (parameter.grad * direction).sum().item()
    step, start = 1e-2, parameter.data.clone()
    with torch.no_grad():
        values = []
        for sign in (1, -1):
            parameter.copy_(start + sign * step * direction)
            values.append(value().item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=2e-2, abs=1e-6)


def test_window_kv_learns_as_if_it_were_not_rounded() -> None:
    """Straight-through: with a rounding that changes nothing, gradients are the same function of the same values."""
    model = build(tiny())
    layer = model.layers[0].attn
    h = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1))
    layer.wkv.weight.requires_grad_(True)
    grads = []
    for rounding in (attention.window_fp8, lambda x: x):
        layer.wkv.weight.grad = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "window_fp8", rounding)
            (layer.keys_values(h, torch.arange(4)) * weight).sum().backward()
        grads.append(layer.wkv.weight.grad.clone())
    assert torch.equal(grads[0], grads[1])
