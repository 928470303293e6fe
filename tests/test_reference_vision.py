"""The vision tower: 2-D rotary positions, attention, merging of patches, and where its outputs go in a prompt."""

import math

import pytest
import torch
from random_models import build, tiny
from torch import Tensor

from deepinfer.reference.vision import Aligner, VisionMLP, grid_angles, rotate_halves
from deepinfer.text.images import END, IMAGE, NEWLINE, START, TEXT, ImageGrid, ImageInput, expand_images

MODEL = build(tiny())
VISION = MODEL.config.vision
assert VISION is not None


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def image(rows: int, cols: int, seed: int = 0) -> ImageInput:
    patches = randn(rows * cols, 3, 4, 4, seed=seed).bfloat16().float()
    return ImageInput(patches, ImageGrid(4 * rows, 4 * cols, rows, cols, -(-rows // 2), -(-cols // 2)))


class TestRotary:
    def test_angles_come_from_row_and_column(self) -> None:
        angles = grid_angles(2, 3, 16, 100.0, torch.device("cpu"))
        for row in range(2):
            for col in range(3):
                freqs = [100.0 ** (-i / 4) for i in range(4)]
                expected = [row * f for f in freqs] + [col * f for f in freqs]
                assert angles[row * 3 + col].tolist() == pytest.approx(expected)

    def test_channel_i_turns_with_channel_i_plus_half(self) -> None:
        x, angles = randn(1, 2, 3, 8), randn(2, 4, seed=1)
        turned = rotate_halves(x, angles)
        for p in range(2):
            for i in range(4):
                a, b, angle = x[0, p, :, i], x[0, p, :, i + 4], angles[p, i].item()
                torch.testing.assert_close(turned[0, p, :, i], a * math.cos(angle) - b * math.sin(angle))
                torch.testing.assert_close(turned[0, p, :, i + 4], b * math.cos(angle) + a * math.sin(angle))

    def test_scores_depend_on_the_offset_in_the_grid(self) -> None:
        q, k = randn(1, 1, 1, 16, seed=1), randn(1, 1, 1, 16, seed=2)
        angles = grid_angles(4, 5, 16, 10000.0, torch.device("cpu")).view(4, 5, 1, 8)

        def score(a: tuple[int, int], b: tuple[int, int]) -> Tensor:
            return (rotate_halves(q, angles[a]) * rotate_halves(k, angles[b])).sum()

        torch.testing.assert_close(score((0, 1), (2, 3)), score((1, 2), (3, 4)))
        assert not torch.isclose(score((0, 1), (2, 3)), score((0, 1), (3, 2)))


class TestTower:
    def test_attention_formula(self) -> None:
        attention = MODEL.vision.blocks[0].attn
        x, angles = randn(1, 6, 64), grid_angles(2, 3, 16, 10000.0, torch.device("cpu"))
        q, k, v = (part.view(1, 6, 4, 16) for part in attention.wqkv(x).split(64, dim=-1))
        q, k = rotate_halves(q, angles), rotate_halves(k, angles)
        heads = []
        for h in range(4):
            scores = (q[0, :, h] @ k[0, :, h].T / 4).softmax(-1)
            heads.append(scores @ v[0, :, h])
        torch.testing.assert_close(attention(x, angles)[0], attention.wo(torch.cat(heads, dim=-1)))

    def test_mlp_holds_gate_then_up(self) -> None:
        mlp = VisionMLP(VISION)
        mlp.w1.weight.data, mlp.w2.weight.data = randn(192, 64), randn(64, 96, seed=1)
        x = randn(2, 64, seed=2)
        gate, up = x @ mlp.w1.weight[:96].T, x @ mlp.w1.weight[96:].T
        torch.testing.assert_close(mlp(x), (gate * gate.sigmoid() * up) @ mlp.w2.weight.T)

    def test_patches_are_flattened_channel_row_column(self) -> None:
        patches = randn(1, 1, 3, 4, 4)
        proj = MODEL.vision.patch_embed.proj
        expected = sum(
            proj.weight[:, 16 * c + 4 * r + col] * patches[0, 0, c, r, col]
            for c in range(3) for r in range(4) for col in range(4)
        )  # fmt: skip
        torch.testing.assert_close(MODEL.vision.patch_embed(patches)[0, 0], expected + proj.bias)


class TestAligner:
    @pytest.mark.parametrize(("rows", "cols"), [(2, 2), (3, 5), (1, 4)])
    def test_merges_cells_of_a_padded_grid(self, rows: int, cols: int) -> None:
        aligner: Aligner = MODEL.aligner
        x = randn(1, rows * cols, 64)
        grid = torch.zeros(-(-rows // 2) * 2, -(-cols // 2) * 2, 64)
        grid[:rows, :cols] = x.view(rows, cols, 64)
        cells = []
        for r in range(0, len(grid), 2):
            for c in range(0, grid.shape[1], 2):
                cells.append(grid[r : r + 2, c : c + 2].reshape(4, 64).T.flatten())  # channel-major
        inner = torch.nn.functional.gelu(aligner.w1(torch.stack(cells)))
        torch.testing.assert_close(aligner(x, rows, cols)[0], aligner.w2(inner))


class TestEmbedding:
    def test_a_span_takes_its_embeddings_in_order(self) -> None:
        pictures = [image(2, 4), image(4, 2, seed=1)]
        image_id = MODEL.config.image_token_id
        ids, types = expand_images([7, image_id, 8, image_id], [p.grid for p in pictures], image_id)
        cells = MODEL.embed_images(pictures)
        x = MODEL.embed_tokens(torch.tensor([ids]), torch.tensor([types]), cells)
        left = iter(cells)
        special = {START: MODEL.image_start, NEWLINE: MODEL.image_newline, END: MODEL.image_end}
        for t, (token, kind) in enumerate(zip(ids, types, strict=True)):
            expected = MODEL.embed.weight[token] if kind == TEXT else next(left) if kind == IMAGE else special[kind]
            torch.testing.assert_close(x[0, t], expected)
        assert next(left, None) is None

    def test_images_count_over_the_whole_batch(self) -> None:
        pictures = [image(2, 2), image(2, 2, seed=1)]
        types = torch.tensor([[IMAGE, TEXT], [TEXT, IMAGE]])
        x = MODEL.embed_tokens(torch.full((2, 2), 9), types, MODEL.embed_images(pictures))
        torch.testing.assert_close(x[0, 0], MODEL.embed_images(pictures[:1])[0])
        torch.testing.assert_close(x[1, 1], MODEL.embed_images(pictures[1:])[0])

    def test_images_do_not_mix(self) -> None:
        pictures = [image(2, 4), image(4, 2, seed=1)]
        alone = torch.cat([MODEL.embed_images([picture]) for picture in pictures])
        torch.testing.assert_close(MODEL.embed_images(pictures), alone)
