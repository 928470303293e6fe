"""The grid plan against the stored grids, its budget for any size, and the token span of an image."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from vocabulary import GOLDEN

from deepinfer.config.model import ModelConfig, VisionConfig
from deepinfer.core.errors import RequestError
from deepinfer.text.images import END, IMAGE, NEWLINE, START, TEXT, ImageGrid, expand_images, image_types, plan_grid

TOWER = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
VISION = {
    "released": VisionConfig(**TOWER, patch_size=14, downsample_ratio=3, max_image_tokens=1024, min_pixels=544 * 544),
    "golden": ModelConfig.from_file(GOLDEN / "checkpoint" / "config.json").vision,
}
GRIDS = json.loads((GOLDEN / "image_grids.json").read_text("utf-8"))
SIDES = st.one_of(st.integers(1, 64), st.integers(1, 5000), st.integers(1, 10**6))


@pytest.mark.parametrize("name", list(GRIDS))
def test_stored_grids(name: str) -> None:
    for width, height, *expected in GRIDS[name]:
        if len(expected) == 1:
            with pytest.raises(RequestError):
                plan_grid(width, height, VISION[name])
        else:
            assert list(dataclasses.astuple(plan_grid(width, height, VISION[name]))) == expected, (width, height)


@pytest.mark.parametrize("name", ["released", "golden"])
@given(width=SIDES, height=SIDES)
@example(1, 10**9)
@example(10**9, 1)
@settings(max_examples=300, deadline=None)
def test_grids_keep_the_budget_and_hang_together(name: str, width: int, height: int) -> None:
    vision = VISION[name]
    grid = plan_grid(width, height, vision)
    assert grid.tokens == len(image_types(grid)) <= vision.max_image_tokens
    assert (grid.height, grid.width) == (grid.vit_rows * vision.patch_size, grid.vit_cols * vision.patch_size)
    assert grid.rows == -(-grid.vit_rows // vision.downsample_ratio) >= 1
    assert grid.cols == -(-grid.vit_cols // vision.downsample_ratio) >= 1


@given(width=st.integers(400, 1200), height=st.integers(400, 1200))
@settings(max_examples=200, deadline=None)
def test_ordinary_images_keep_their_shape(width: int, height: int) -> None:
    grid = plan_grid(width, height, VISION["released"])
    assert grid.width / grid.height == pytest.approx(width / height, rel=0.1)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0), (-1, 5)])
def test_empty_images_are_refused(width: int, height: int) -> None:
    with pytest.raises(RequestError, match="both sides must be at least 1"):
        plan_grid(width, height, VISION["golden"])


@pytest.mark.parametrize(
    "changes", [{"max_image_tokens": 3}, {"max_wh_ratio": 0.1}, {"max_wh_ratio": 0.1, "patch_size": 1}]
)
def test_what_no_grid_can_hold_is_refused(changes: dict[str, Any]) -> None:
    """Too few tokens for one cell, or a ratio that leaves a side of less than a pixel."""
    vision = dataclasses.replace(VISION["golden"], max_image_tokens=5, min_pixels=4)
    with pytest.raises(RequestError, match="5 x 1 pixels does not fit"):
        plan_grid(5, 1, dataclasses.replace(vision, **changes))


def test_width_is_limited_only_where_a_ratio_is_set() -> None:
    limited = dataclasses.replace(VISION["golden"], max_wh_ratio=2.0)
    assert plan_grid(64, 8, limited) == plan_grid(16, 8, VISION["golden"])
    assert plan_grid(8, 64, limited) == plan_grid(8, 64, VISION["golden"])
    assert plan_grid(16, 8, limited) == plan_grid(16, 8, VISION["golden"])


def test_small_images_grow_to_the_least_number_of_pixels() -> None:
    assert plan_grid(2, 2, VISION["golden"]) == ImageGrid(16, 16, 4, 4, 2, 2)
    assert plan_grid(2, 2, dataclasses.replace(VISION["golden"], min_pixels=0)) == ImageGrid(4, 4, 1, 1, 1, 1)


class TestSpans:
    grid = ImageGrid(height=8, width=12, vit_rows=4, vit_cols=6, rows=2, cols=3)

    def test_types(self) -> None:
        row = [IMAGE, IMAGE, IMAGE, NEWLINE]
        assert image_types(self.grid) == [START, *row, *row, END]
        assert (START, IMAGE, NEWLINE, END, TEXT) == (0, 1, 2, 3, -1)

    @pytest.mark.parametrize("case", ["big", "tall", "tiny", "wide"])
    def test_golden_spans(self, case: str) -> None:
        golden = load_file(GOLDEN / "vision_fp32.safetensors")
        ids, types = golden[f"{case}.ids"].tolist(), golden[f"{case}.types"].tolist()
        vit_rows, vit_cols, rows, cols = golden[f"{case}.grid"].tolist()
        grid = ImageGrid(vit_rows * 4, vit_cols * 4, vit_rows, vit_cols, rows, cols)
        start = types.index(START)
        short = [*ids[: start + 1], *ids[types.index(END) + 1 :]]
        assert expand_images(short, [grid], ids[start]) == (ids, types)

    @given(data=st.data())
    @settings(max_examples=100, deadline=None)
    def test_expansion_is_the_text_with_its_spans(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, 5), max_size=12))
        grids = [ImageGrid(0, 0, 0, 0, *data.draw(st.tuples(*[st.integers(1, 3)] * 2))) for _ in range(ids.count(4))]
        out_ids, types = expand_images(ids, grids, 4)
        assert len(out_ids) == len(types) == len(ids) + sum(grid.tokens - 1 for grid in grids)
        assert [i for i, kind in zip(out_ids, types, strict=True) if kind == TEXT] == [i for i in ids if i != 4]
        assert [kind for kind in types if kind != TEXT] == [kind for grid in grids for kind in image_types(grid)]
        assert all(i == 4 for i, kind in zip(out_ids, types, strict=True) if kind != TEXT)

    def test_text_alone(self) -> None:
        assert expand_images([1, 2], [], 4) == ([1, 2], [-1, -1])
        assert expand_images([1, 2], [], None) == ([1, 2], [-1, -1])

    @pytest.mark.parametrize(("ids", "images"), [([1, 4], 0), ([1], 1), ([4, 4], 1), ([4], 2)])
    def test_counts_must_agree(self, ids: list[int], images: int) -> None:
        with pytest.raises(RequestError, match=rf"{ids.count(4)} image placeholders \(id 4\) but {images} images"):
            expand_images(ids, [self.grid] * images, 4)
