"""Properties of the whole model, over many shapes and schedules.

Where two runs of the same tokens are compared, the cache formats' roundings are taken out: another order of
summation may round a value the other way, which says nothing about the property. All roundings act on single tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from random_models import VARIANTS, build, prompt, tiny, to_bfloat16
from torch import Tensor

from deepinfer.reference import attention, indexer
from deepinfer.reference.model import ForwardOutput, ReferenceModel, Trace
from deepinfer.text.images import TEXT, ImageGrid, ImageInput, expand_images

LENGTHS = [1, 2, 3, 7, 24]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@cache
def model(variant: str) -> ReferenceModel:
    return build(VARIANTS[variant]())


@pytest.fixture
def smooth(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache format rounds."""
    for module, name in ((attention, "window_fp8"), (attention, "latent_nvfp4"), (indexer, "index_mxfp4")):
        monkeypatch.setattr(module, name, lambda x: x)


def close(actual: Tensor, expected: Tensor) -> None:
    """Rows agree within 1e-5 of their norm."""
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert actual.shape == expected.shape
    assert error.max() < 1e-5


def picture(seed: int = 0) -> ImageInput:
    patches = torch.randn(15, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    return ImageInput(patches, ImageGrid(12, 20, 3, 5, 2, 3))


def with_image(run: ReferenceModel, before: int, after: int) -> tuple[Tensor, Tensor]:
    """Ids and types [1, T] of a prompt with one image between two stretches of text."""
    image_id = run.config.image_token_id
    text = [token for token in prompt(run, before + after)[0].tolist() if token != image_id] + [7] * 2
    ids, types = expand_images([*text[:before], image_id, *text[before : before + after]], [picture().grid], image_id)
    return torch.tensor([ids]), torch.tensor([types])


def replayed(run: ReferenceModel, ids: Tensor, starts: list[int], compact: bool) -> ForwardOutput:
    return run(ids, replay_start=torch.tensor(starts), compact=compact)


@each_variant
class TestForward:
    @pytest.mark.parametrize("length", LENGTHS)
    def test_shapes_and_finite_values(self, variant: str, length: int) -> None:
        run = model(variant)
        out = run(prompt(run, length))
        wide = len(run.config.dspark_target_layer_ids) * run.config.hidden_size
        assert out.logits.shape == (1, length, run.config.vocab_size)
        assert (out.features.shape, out.hidden.shape) == ((1, length, wide), (1, length, run.config.hidden_size))
        assert out.logits.dtype is torch.float32
        assert bool(out.logits.isfinite().all())

    def test_equal_runs_are_equal(self, variant: str) -> None:
        run = model(variant)
        ids = prompt(run, 24)
        assert torch.equal(run(ids).logits, run(ids).logits)

    @pytest.mark.usefixtures("smooth")
    @pytest.mark.parametrize("at", [1, 8, 9, 23])
    def test_a_later_token_changes_nothing_before_it(self, variant: str, at: int) -> None:
        run = model(variant)
        ids = prompt(run, 24)
        other = ids.clone()
        other[0, at:] = 5 + (ids[0, at:] - 4) % (run.config.vocab_size - 5)
        before, after = run(ids), run(other)
        close(after.logits[:, :at], before.logits[:, :at])
        assert not torch.allclose(after.logits[:, at], before.logits[:, at], atol=1e-3)

    @pytest.mark.usefixtures("smooth")
    @pytest.mark.parametrize("length", LENGTHS)
    def test_a_prefix_gives_the_rows_of_the_whole(self, variant: str, length: int) -> None:
        run = model(variant)
        ids = prompt(run, 24)
        part, whole = run(ids[:, :length]), run(ids)
        close(part.logits, whole.logits[:, :length])

    @pytest.mark.usefixtures("smooth")
    def test_padding_and_neighbours_change_nothing(self, variant: str) -> None:
        run = model(variant)
        batch = torch.cat([prompt(run, 24, seed=seed) for seed in range(4)])
        together = run(batch)
        for row, length in enumerate((24, 1, 6, 17)):
            alone = run(batch[row : row + 1, :length])
            close(together.logits[row, :length], alone.logits[0])

    @pytest.mark.usefixtures("smooth")
    def test_an_early_token_reaches_the_end(self, variant: str) -> None:
        """Far beyond the window: through compressed KV and the layers' growing reach."""
        run = model(variant)
        ids = prompt(run, 24)
        other = ids.clone()
        other[0, 0] = (ids[0, 0] + 1) % run.config.vocab_size
        change = (run(other).logits[0, -1] - run(ids).logits[0, -1]).norm()
        assert change > 1e-4


@each_variant
@pytest.mark.usefixtures("smooth")
class TestReplay:
    @pytest.mark.parametrize("keep", [1, 2, 7, 23])
    def test_compact_gives_the_suffix_of_mask(self, variant: str, keep: int) -> None:
        run = model(variant)
        ids = prompt(run, 24)
        mask, compact = (replayed(run, ids, [24 - keep], c) for c in (False, True))
        assert (mask.first, compact.first) == (0, 24 - keep)
        close(compact.logits, mask.logits[:, -keep:])

    def test_from_the_start_it_is_off(self, variant: str) -> None:
        run = model(variant)
        ids = prompt(run, 24)
        off = run(ids)
        for compact in (False, True):
            out = replayed(run, ids, [0], compact)
            close(out.logits, off.logits)

    def test_every_sequence_has_its_own_start(self, variant: str) -> None:
        run = model(variant)
        ids = torch.cat([prompt(run, 24, seed=seed) for seed in range(3)])
        starts = [5, 0, 18]
        for compact in (False, True):
            together = replayed(run, ids, starts, compact)
            for row, start in enumerate(starts):
                alone = replayed(run, ids[row : row + 1], [start], compact=True)
                close(together.logits[row, start - together.first :], alone.logits[0])

    def test_it_differs_from_running_everything(self, variant: str) -> None:
        """A decoder with two layers or more loses what lies beyond its cut windows."""
        run = model(variant)
        ids = prompt(run, 24)
        change = (replayed(run, ids, [20], True).logits - run(ids).logits[:, 20:]).norm(dim=-1)
        assert change.max() > 1e-3


class TestImages:
    run = model("all parts")

    @pytest.mark.usefixtures("smooth")
    def test_the_image_matters_from_its_place_on(self) -> None:
        ids, types = with_image(self.run, 5, 6)
        first, second = (self.run(ids, types, [picture(seed)]).logits for seed in (0, 1))
        close(second[:, :6], first[:, :6])
        changed = (second - first)[0].norm(dim=-1) > 1e-3
        assert changed[6:].all()

    @pytest.mark.usefixtures("smooth")
    def test_neighbours_with_and_without_images(self) -> None:
        ids, types = with_image(self.run, 5, 6)
        text = prompt(self.run, ids.shape[1])
        batch, kinds = torch.cat((text, ids, ids)), torch.cat((torch.full_like(types, TEXT), types, types))
        together = self.run(batch, kinds, [picture(0), picture(1)]).logits
        close(together[0], self.run(text).logits[0])
        close(together[1], self.run(ids, types, [picture(0)]).logits[0])
        close(together[2], self.run(ids, types, [picture(1)]).logits[0])

    @pytest.mark.usefixtures("smooth")
    def test_replay_inside_an_image(self) -> None:
        ids, types = with_image(self.run, 5, 6)
        start = torch.tensor([9])
        mask, compact = (self.run(ids, types, [picture()], start, c).logits for c in (False, True))
        close(compact, mask[:, 9:])

    def test_text_types_are_the_default(self) -> None:
        ids = prompt(self.run, 9)
        assert torch.equal(self.run(ids, torch.full_like(ids, TEXT)).logits, self.run(ids).logits)

    @pytest.mark.usefixtures("smooth")
    def test_image_tokens_route_by_their_own_bias(self) -> None:
        ids, types = with_image(self.run, 5, 6)
        before = self.run(ids, types, [picture()]).logits
        other = build(tiny())
        for layer in other.layers:
            layer.ffn.gate.bias_vl.copy_(-3 * layer.ffn.gate.bias_vl)
        close(other(prompt(other, 9)).logits, self.run(prompt(other, 9)).logits)
        after = other(ids, types, [picture()]).logits
        close(after[:, :5], before[:, :5])
        assert not torch.allclose(after[:, 6:], before[:, 6:], atol=1e-3)


class TestSchedules:
    def trace(self, data: dict[str, Any], length: int = 24) -> tuple[Trace, ForwardOutput, ReferenceModel]:
        run, seen = build(data), Trace()
        return seen, run(prompt(run, length), trace=seen), run

    @each_variant
    def test_sources_make_what_the_config_says(self, variant: str) -> None:
        seen, _, run = self.trace(VARIANTS[variant]())
        config = run.config
        assert set(seen.shared) == set(config.kv_source_layer_ids)
        assert set(seen.selected) == set(config.index_source_layer_ids)
        assert len(seen.streams) == len(seen.attention) == config.num_hidden_layers
        for layer, shared in seen.shared.items():
            assert shared.latents.shape == (1, 24 // config.ratio(layer), config.head_dim)
            assert shared.keys.shape == (1, 24 // config.ratio(layer), config.index_head_dim)

    @each_variant
    def test_selections_are_visible_and_within_the_budget(self, variant: str) -> None:
        seen, _, run = self.trace(VARIANTS[variant]())
        for layer, selected in seen.selected.items():
            for t, row in enumerate(selected[0].tolist()):
                chosen = [j for j in row if j >= 0]
                visible = (t + 1) // run.config.ratio(layer)
                assert len(set(chosen)) == len(chosen) == min(visible, run.config.index_topk) or layer > (
                    run.config.candidate_source_layer_id
                )
                assert all(j < visible for j in chosen)

    def test_reindex_layers_choose_among_the_kept_blocks(self) -> None:
        """Two blocks of four, the newest among them, hold everything that a reindex layer may choose."""
        seen, _, _ = self.trace(tiny(candidate_topk_blocks=2, index_topk=20))
        for t, row in enumerate(seen.selected[4][0].tolist()):
            blocks = {j // 4 for j in row if j >= 0}
            assert len(blocks) <= 2
            assert t // 4 in blocks
        assert max(len({j // 4 for j in row if j >= 0}) for row in seen.selected[3][0].tolist()) > 2

    @pytest.mark.usefixtures("smooth")
    def test_enough_candidates_are_as_good_as_none(self) -> None:
        data = tiny(candidate_topk_blocks=6)
        _, limited, _ = self.trace(data)
        _, unlimited, _ = self.trace(tiny(candidate_source_layer_id=-1))
        close(limited.logits, unlimited.logits)

    def test_features_are_the_mean_of_the_streams_after_engram(self) -> None:
        seen, out, run = self.trace(tiny(dspark_target_layer_ids=[2, 4]))
        plain = seen.streams[2].mean(2)
        torch.testing.assert_close(out.features[..., :64], plain)
        assert not torch.allclose(out.features[..., 64:], seen.streams[4].mean(2), atol=1e-3)  # layer 4 has Engram
        assert run.config.has_engram(4)

    def test_a_window_only_model_part_sees_its_window(self) -> None:
        """A ratio-0 first layer with a window of 6: its output at row 10 depends on rows 5 to 10 alone."""
        run = build(tiny())
        outputs = []
        for seed in range(2):
            ids, seen = prompt(run, 11).clone(), Trace()
            ids[0, :2] = prompt(run, 2, seed=seed + 1)[0]  # Engram looks back three tokens from row 5
            run(ids, trace=seen)
            outputs.append(seen.attention[0][0, 10])
        torch.testing.assert_close(outputs[0], outputs[1])


@each_variant
class TestBfloat16:
    def errors(self, variant: str) -> Tensor:
        """Relative error of every row against FP32, weights being the same."""
        narrow, wide = to_bfloat16(build(VARIANTS[variant]())), build(VARIANTS[variant]())
        for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
            one.data = other.data.float()
        ids = prompt(wide, 24)
        out, expected = narrow(ids), wide(ids).logits
        assert (out.hidden.dtype, out.logits.dtype) == (torch.bfloat16, torch.float32)
        assert bool(out.logits.isfinite().all())
        return (out.logits - expected).norm(dim=-1) / expected.norm(dim=-1)

    @pytest.mark.usefixtures("smooth")
    def test_is_close(self, variant: str) -> None:
        assert self.errors(variant).median() < 0.025

    def test_is_in_the_neighbourhood_with_roundings(self, variant: str) -> None:
        """Values on either side of a code's boundary, a step of 6% to 50%, are common among BF16 runs."""
        assert self.errors(variant).median() < 0.3


def test_a_trace_does_not_change_the_result() -> None:
    run: Callable[..., ForwardOutput] = model("all parts")
    ids = prompt(model("all parts"), 9)
    assert torch.equal(run(ids, trace=Trace()).logits, run(ids).logits)


@pytest.mark.usefixtures("smooth")
def test_other_classes_change_engram_only_where_they_differ() -> None:
    data = tiny()
    first, second = build(data), build(data)
    second.classes = first.classes.clone()
    ids = prompt(first, 9)
    second.classes[ids[0, 4]] = (second.classes[ids[0, 4]] + 1) % 90
    before, after = first(ids).logits[0], second(ids).logits[0]
    place = ids[0].tolist().index(ids[0, 4].item())
    close(after[:place], before[:place])
    assert not torch.allclose(before[place], after[place], atol=1e-3)


def test_grid_of_an_image_decides_its_cells() -> None:
    run = model("all parts")
    wide, tall = picture(), replace(picture(), grid=ImageGrid(20, 12, 5, 3, 3, 2))
    assert run.embed_images([wide]).shape == (6, 64)
    assert not torch.allclose(run.embed_images([wide]), run.embed_images([tall]))
