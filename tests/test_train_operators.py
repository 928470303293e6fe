"""The operators that train fast compute what the reference computes."""

import pytest
import torch
from random_models import build, prompt, tiny
from torch import nn

from deepinfer.reference import attention
from deepinfer.reference.indexer import Ties
from deepinfer.reference.model import ReferenceModel
from train import accelerate
from train.masked_attention import index_loss, top_mask
from train.operators import STATE

# Rows must come in multiples of the window; the rounding of caches is taken out, since another order of summation
# can flip a code and then moves a row far beyond any tolerance.
WINDOW, TOKENS = 8, 40


@pytest.fixture
def model() -> ReferenceModel:
    return build(tiny(sliding_window=WINDOW), ties=Ties.TOPK)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, function in accelerate.replacements():
        monkeypatch.setattr(owner, name, function)
    plain = lambda x: x  # noqa: E731
    for module, name in ((attention, "window_fp8"), (attention, "latent_nvfp4")):
        monkeypatch.setattr(module, name, plain)
    STATE.begin(sparse=True)
    STATE.patch_mask = None


def logits(model: ReferenceModel, cut: int | None) -> torch.Tensor:
    ids = torch.cat([prompt(model, TOKENS, seed) for seed in (1, 2)])
    start = None if cut is None else torch.tensor([cut, 0])
    with torch.no_grad():
        return model(ids, replay_start=start).logits


@pytest.mark.parametrize("cut", [None, 0, 13, 24, TOKENS - 1])
def test_sparse_steps_equal_the_reference(
    model: ReferenceModel, cut: int | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unrounded:
        for name in ("window_fp8", "latent_nvfp4"):
            unrounded.setattr(attention, name, lambda x: x)
        expected = logits(model, cut)
    request.getfixturevalue("fast")
    found = logits(model, cut)
    assert (found - expected).norm(dim=-1).div(expected.norm(dim=-1)).max() < 1e-4


@pytest.mark.usefixtures("fast")
def test_dense_steps_see_every_visible_position(model: ReferenceModel) -> None:
    sparse = logits(model, None)
    STATE.begin(sparse=False)
    dense = logits(model, None)
    few = model.config.index_topk
    assert torch.allclose(dense[:, :few], sparse[:, :few], atol=1e-5), "early rows select all they see"
    assert not torch.allclose(dense[:, -1], sparse[:, -1], atol=1e-3)


@pytest.mark.usefixtures("fast")
def test_index_loss_trains_the_indexer_and_nothing_else(model: ReferenceModel) -> None:
    ids = prompt(model, TOKENS, 3)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    STATE.begin(sparse=False)
    model(ids)
    loss = index_loss()
    loss.backward()
    assert torch.isfinite(loss)
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched
    assert all(".indexer." in name for name in touched)
    sources = model.config.index_source_layer_ids
    assert {int(name.split(".")[1]) for name in touched} == set(sources)


@pytest.mark.usefixtures("fast")
def test_attention_mass_of_a_row_is_what_its_heads_give_to_compressed_positions(model: ReferenceModel) -> None:
    STATE.begin(sparse=False)
    logits(model, None)
    for record in STATE.records:
        assert record.mass is not None
        assert (record.mass >= 0).all()
        assert (record.mass[~record.allowed] == 0).all()
        layers = record.mass.sum(-1) / model.config.num_attention_heads
        assert (layers <= model.config.num_hidden_layers).all()


@pytest.mark.usefixtures("fast")
def test_loads_count_every_row_once_for_each_of_its_experts(model: ReferenceModel) -> None:
    STATE.begin(sparse=True)
    ids = prompt(model, TOKENS, 4)
    types = torch.full_like(ids, -1)
    types[0, 3:7] = torch.tensor([0, 2, 2, 3])
    with torch.no_grad():
        model(ids, types)
    assert len(STATE.loads) == model.config.num_hidden_layers
    for _, load in STATE.loads:
        assert load.sum(1).tolist() == [36 * model.config.num_experts_per_tok, 4 * model.config.num_experts_per_tok]


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_top_mask_takes_the_best_allowed(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    scores = torch.randn(4, 5, 11, generator=generator)
    allowed = torch.rand(4, 5, 11, generator=generator) < 0.6
    mask = top_mask(scores, allowed, count)
    assert not (mask & ~allowed).any()
    assert (mask.sum(-1) == allowed.sum(-1).clamp(max=count)).all()
    worst_taken = scores.masked_fill(~mask, torch.inf).amin(-1)
    best_left = scores.masked_fill(mask | ~allowed, -torch.inf).amax(-1)
    assert (worst_taken > best_left).all()


def test_gradients_equal_the_references(model: ReferenceModel, request: pytest.FixtureRequest) -> None:
    ids = prompt(model, TOKENS, 5)
    wanted = (
        "layers.0.ffn.experts.w1",
        "layers.3.attn.wq_b.weight",
        "layers.1.hc_attn.fn",
        "layers.0.engram.wkv.weight",
    )
    chosen = {name: p for name, p in model.named_parameters() if name in wanted}
    assert len(chosen) == len(wanted)

    def gradients() -> dict[str, torch.Tensor]:
        for p in model.parameters():
            p.requires_grad_(True)
            p.grad = None
        loss = nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
        loss.backward()
        return {name: p.grad.clone() for name, p in chosen.items() if p.grad is not None}

    patched = pytest.MonkeyPatch()
    for name in ("window_fp8", "latent_nvfp4"):
        patched.setattr(attention, name, lambda x: x)
    expected = gradients()
    patched.undo()
    request.getfixturevalue("fast")
    found = gradients()
    for name in wanted:
        assert (found[name] - expected[name]).norm() / expected[name].norm() < 1e-3, name
