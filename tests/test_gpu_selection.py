"""The choice of the best on a GPU: exact, and in the same order each time. Run with scripts/gpu_tests.sh."""

import pytest
import torch

from deepinfer.ops.indexer import cuda

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("levels", [0, 3, 40], ids=["distinct", "many equal", "some equal"])
@pytest.mark.parametrize(("rows", "width"), [(1, 600), (8, 1024), (3, 8192), (70, 9000), (2, 131072), (40, 70000)])
def test_exact_and_repeatable(rows: int, width: int, levels: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows + width + levels)
    scores = torch.randn(rows, width, device="cuda", generator=generator)
    if levels:
        scores = (scores * levels).round() / levels
    visible = torch.randint(width // 2, width + 1, (rows,), device="cuda", generator=generator).int()
    found = cuda.best_of_rows(scores, visible)
    for row, end in enumerate(visible.tolist()):
        order = torch.sort(scores[row, :end], descending=True, stable=True).indices[: cuda.COUNT]
        wanted = torch.full((cuda.COUNT,), -1, device="cuda")
        wanted[: len(order)] = order.sort().values
        given = found[row].long()
        assert torch.equal(torch.cat((given[given >= 0].sort().values, given[given < 0])), wanted)
    for _ in range(5):
        assert torch.equal(cuda.best_of_rows(scores, visible), found)
