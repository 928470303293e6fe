"""Masters, schedule, canvas and anchors: the parts of a training step."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import build, tiny

from deepinfer.checkpoint.layout import Storage, tensor_layout
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.writer import write_checkpoint
from deepinfer.config.model import ModelConfig, VisionConfig
from deepinfer.reference.loading import load_reference
from deepinfer.reference.loading import state as stored_state
from deepinfer.reference.vision import Aligner, VisionTower
from deepinfer.text.images import ImageInput, plan_grid
from deepinfer.text.tokenizer import Tokenizer
from train import accelerate
from train.canvas import Canvas
from train.drafter import choose_anchors, draft_losses, gather_rows
from train.initial import initialise
from train.loop import CapturedStep, learning_rate, variants
from train.masters import Masters, balance, storages, stored_value
from train.mini_config import mini_config
from train.operators import STATE
from train.refine import copy_window
from train.target import SCHEDULES, Trainer, load_checkpoint, token_losses

MINI = Path(__file__).parents[1] / "checkpoints" / "mini"
VISION = VisionConfig(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=48,
    patch_size=4,
    downsample_ratio=2,
    max_image_tokens=64,
    min_pixels=64,
)


def masters_of_tiny() -> tuple[Masters, dict[str, torch.nn.Parameter], ModelConfig]:
    model = build(tiny())
    named = {name: p.requires_grad_(True) for name, p in model.named_parameters()}
    storage = storages(model, tensor_layout(model.config, Storage.BF16))
    return Masters(named, storage, "cpu", weight_decay=0.1), named, model.config


def test_parameters_hold_what_their_checkpoint_will_hold(tmp_path: Path) -> None:
    model = build(tiny())
    named = dict(model.named_parameters())
    Masters(named, storages(model, tensor_layout(model.config, Storage.BF16)), "cpu", weight_decay=0.0)
    values = {name: tensor.float() for name, tensor in stored_state(model).items()}
    write_checkpoint(tmp_path / "tiny", tiny(), values, head=Storage.BF16)
    again = load_reference(Checkpoint(tmp_path / "tiny"), model.classes.tolist())
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, named[name].float()), name


def test_a_step_moves_masters_against_the_gradient_and_leaves_no_gradient() -> None:
    masters, named, _ = masters_of_tiny()
    masters.lr.fill_(1e-2)
    before = {name: master.clone() for name, master in masters.masters.items()}
    signs = {}
    for name, parameter in named.items():
        sizes = 0.5 + torch.rand(parameter.shape)  # AdamW's first step is the sign, but for the tiniest gradients
        parameter.grad = (torch.randn(parameter.shape) >= 0).float().mul(2).sub(1).mul(sizes).to(parameter.dtype)
        signs[name] = parameter.grad.sign().float()
    norm = masters.step(clip=1e9)
    assert math.isfinite(norm)
    for name, parameter in named.items():
        assert parameter.grad is None
        # The first AdamW step is lr * sign(gradient), besides the decay of matrices.
        moved = masters.masters[name] - before[name] * (1 - 1e-3 if masters._decays(name) else 1)
        assert torch.allclose(moved, -1e-2 * signs[name], atol=1e-5), name
        stored = stored_value(masters.masters[name], masters.storage[name])
        assert torch.equal(parameter.float(), stored), name


def test_clipping_bounds_the_whole_gradient() -> None:
    masters, named, _ = masters_of_tiny()
    masters.lr.fill_(0.0)
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    expected = math.sqrt(sum(p.numel() for p in named.values()))
    assert masters.step(clip=1.0) == pytest.approx(expected, rel=1e-4)


def test_masters_go_on_from_their_saved_state(tmp_path: Path) -> None:
    first, named, _ = masters_of_tiny()
    second, others, _ = masters_of_tiny()
    first.lr.fill_(1e-3)
    second.lr.fill_(1e-3)

    def step(masters: Masters, parameters: dict[str, torch.nn.Parameter], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        masters.step(1.0)

    step(first, named, 1)
    torch.save(first.state(), tmp_path / "state.pt")
    second.load(torch.load(tmp_path / "state.pt", weights_only=True))
    step(first, named, 2)
    step(second, others, 2)
    for name in named:
        assert torch.equal(named[name], others[name]), name


def test_balance_lifts_idle_experts() -> None:
    gate = build(tiny()).layers[0].ffn.gate
    before, vision = gate.bias.clone(), gate.bias_vl.clone()
    load = torch.tensor([[9.0, 0, 3, 3, 3, 0], [2.0, 2, 2, 2, 2, 2]])
    balance([(gate, load)], torch.tensor(0.5))
    assert (gate.bias - before).tolist() == pytest.approx([-0.5, 0.5, 0, 0, 0, 0.5])
    assert torch.equal(gate.bias_vl, vision)


@given(st.sampled_from(sorted(SCHEDULES)), st.floats(0, 1))
def test_schedules_always_offer_steps(name: str, progress: float) -> None:
    shares, mixtures = SCHEDULES[name]
    table = shares(progress)
    assert sum(table.values()) == pytest.approx(1)
    assert {variant.tokens for variant in table} <= set(mixtures)
    assert 0 < learning_rate(progress, 1000, 2.0) <= 2.0
    assert learning_rate(progress, 0, 2.0) <= 0.01


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_steps_of_a_part_of_a_schedule_are_known_before_it_starts(name: str) -> None:
    shares, mixtures = SCHEDULES[name]
    assert set(variants(shares, 0.0, 0.2)) == set(shares(0.0))
    assert set(variants(shares, 0.6, 1.0)) == set(shares(1.0))
    assert {variant.tokens for variant in variants(shares, 0.0, 1.0)} == set(mixtures)


def test_captured_step_without_a_gpu_runs_its_function() -> None:
    calls = []

    def step(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls.append(inputs["x"].clone())
        return {"y": inputs["x"] * 2}

    captured = CapturedStep(step, {"x": torch.tensor([1.0])}, None, "cpu")
    assert captured({"x": torch.tensor([3.0])})["y"].tolist() == [6.0]
    assert [call.tolist() for call in calls] == [[3.0]]


def test_images_of_several_grids_on_one_canvas_embed_as_they_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = [(16, 8), (20, 12), (8, 8), (28, 4)]
    tower, aligner = VisionTower(VISION).requires_grad_(False), Aligner(VISION, 24).requires_grad_(False)
    for parameter in [*tower.parameters(), *aligner.parameters()]:
        parameter.copy_(torch.randn(parameter.shape) * 0.2)
    grids = [plan_grid(*size, VISION) for size in sizes]
    images = [ImageInput(torch.randn(grid.vit_rows * grid.vit_cols, 3, 4, 4), grid) for grid in grids]
    alone = []
    for image in images:
        rows, cols = image.grid.vit_rows, image.grid.vit_cols
        alone.append(aligner(tower(image.patches[None], rows, cols), rows, cols)[0])
    slots = len(sizes) + 2
    most = max(len(image.patches) for image in images)
    batch = {
        "patches": np.zeros((slots, most, 3, 4, 4), np.float32),
        "grid": np.tile(np.array([[grids[0].vit_rows, grids[0].vit_cols]]), (slots, 1)),
        "image_row": np.array([0, 0, 1, 2, -1, -1]),
    }
    for slot, image in enumerate(images):
        batch["patches"][slot, : len(image.patches)] = image.patches.numpy()
        batch["grid"][slot] = image.grid.vit_rows, image.grid.vit_cols
    canvas = Canvas(sizes, VISION)
    placed = canvas.place(batch)
    for owner, name, function in accelerate.replacements():
        monkeypatch.setattr(owner, name, function)
    monkeypatch.setattr(STATE, "patch_mask", placed["patch_mask"])
    seen = tower(placed["patches"], canvas.rows, canvas.cols) * placed["patch_mask"][..., None]
    cells = aligner(seen, canvas.rows, canvas.cols).flatten(0, 1)[placed["cells"]]
    expected = torch.cat(alone)
    assert torch.allclose(cells[: len(expected)], expected, atol=1e-4)


def test_token_losses_are_of_the_next_token() -> None:
    logits = torch.full((1, 3, 5), -50.0)
    logits[0, 0, 2] = logits[0, 1, 4] = 50.0
    losses = token_losses(logits, torch.tensor([[1, 2, 3]]))
    assert losses.tolist()[0] == pytest.approx([0.0, 100.0, 0.0])


@given(st.integers(0, 2**20), st.integers(1, 5), st.integers(1, 8))
def test_anchors_lie_in_replies_and_blocks_end_with_them(seed: int, block: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.tensor([1.0, 0.1, 0.0])[torch.randint(0, 3, (3, 24), generator=generator)]
    weight[0] = 0.1
    anchors, valid = choose_anchors(weight, block, count)
    assert anchors.shape == (3, count)
    assert not valid[0].any(), "a row without replies has no valid anchor"
    for row in range(3):
        for place, flags in zip(anchors[row].tolist(), valid[row].tolist(), strict=True):
            usable = place < 24 - block
            run = [usable and bool(weight[row, place + k] == 1) if place + k < 24 else False for k in range(block)]
            assert flags == [all(run[: k + 1]) for k in range(block)]


def test_gather_rows_and_its_gradient() -> None:
    x = torch.randn(2, 5, 3, requires_grad=True)
    at = torch.tensor([[0, 4], [4, 4]])
    rows = gather_rows(x, at)
    assert torch.equal(rows, torch.stack((x[0, 0], x[0, 4], x[1, 4], x[1, 4])))
    rows.sum().backward()
    assert x.grad is not None
    assert x.grad[1, 4].tolist() == [2, 2, 2]


def test_draft_losses_of_a_perfect_draft() -> None:
    teacher = torch.full((2, 3, 4), -30.0)
    labels = torch.tensor([[0, 1, 2], [3, 2, 1]])
    teacher.scatter_(2, labels[..., None], 30.0)
    valid = torch.ones(2, 3, dtype=torch.bool)
    found = draft_losses(teacher, teacher, torch.full((2, 3), 20.0), labels, valid)
    assert found["loss"] < 1e-6
    assert found["length"] == 4
    wrong = draft_losses(teacher.flip(2), teacher, torch.full((2, 3), 20.0), labels, valid)
    assert wrong["distance"] == pytest.approx(2.0)
    assert wrong["length"] == 1
    assert wrong["confidence"] > 10


def test_invalid_rows_count_for_nothing() -> None:
    torch.manual_seed(1)
    draft, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    labels, confidence = torch.zeros(2, 3, dtype=torch.long), torch.randn(2, 3)
    valid = torch.tensor([[True, True, True], [True, False, False]])
    first = draft_losses(draft, teacher, confidence, labels, valid)
    draft[1, 1:], teacher[1, 1:], confidence[1, 1:] = 7.0, -3.0, 9.0
    second = draft_losses(draft, teacher, confidence, labels, valid)
    assert first["loss"] == pytest.approx(second["loss"].item())


def test_mini_config_is_accepted_and_has_every_part() -> None:
    data = mini_config(Tokenizer.from_file(MINI))
    config = ModelConfig.from_dict(data, "mini")
    assert config.n_routed_experts >= 16
    assert config.draft_stages in (2, 3)
    assert config.dspark_block_size == 5
    assert config.max_position_embeddings >= 4096
    assert {config.ratio(layer) for layer in config.kv_source_layer_ids} == {1, 2}
    assert [config.selects_candidates(layer) for layer in config.index_source_layer_ids].count(True) >= 2
    assert config.engram_layer_ids
    assert config.vision is not None
    stored = sum(spec.stored_bytes for spec in tensor_layout(config, Storage.BF16).values())
    assert stored < 31e6, "with headers below 32 MB"


def test_compressors_start_as_their_layers_window_projection() -> None:
    model = build(tiny())
    initialise(model, 1)
    for layer in model.config.kv_source_layer_ids:
        attn = model.layers[layer].attn
        assert torch.equal(attn.compressor.wkv.weight, attn.wkv.weight)
        assert attn.compressor.wkv.weight.std() > 0


def test_refining_starts_from_the_stored_values_and_copies_the_window(tmp_path: Path) -> None:
    trainer = Trainer(MINI, "cpu", 1e-3)
    load_checkpoint(trainer, MINI)
    stored = Checkpoint(MINI)
    name = "layers.5.attn.wkv.weight"
    assert torch.equal(trainer.masters.masters[name], stored.load(name))
    assert torch.equal(trainer.model.mtp[0].main_proj.weight.float(), stored.load("mtp.0.main_proj.weight"))
    copy_window(trainer)
    masters = trainer.masters.masters
    assert torch.equal(masters["layers.5.attn.compressor.wkv.weight"], masters[name])
    found = dict(trainer.model.named_parameters())["layers.5.attn.compressor.wkv.weight"]
    assert torch.equal(found, masters[name])


def test_initial_values_are_reproducible_and_start_near_a_plain_residual_stream() -> None:
    first, second = build(tiny()), build(tiny(), seed=9)
    initialise(first, 3)
    initialise(second, 3)
    for (name, one), (_, other) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    x = torch.randn(1, 4, 1, first.config.hidden_size).expand(-1, -1, first.config.hc_mult, -1)
    mix = first.layers[0].hc_attn(x)
    assert mix.pre.sum(-1).mean() == pytest.approx(1, abs=0.2)
    assert mix.post.mean() == pytest.approx(1, abs=0.2)
    assert mix.comb.diagonal(dim1=-2, dim2=-1).mean() > 0.6
