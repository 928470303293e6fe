"""Batch invariance on a GPU. Run with scripts/gpu_tests.sh."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import check_invariance

from deepinfer.ops.invariance import product, row_sums

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("inner", "columns"), [(256, 320), (5120, 1280), (96, 33)], ids=str)
def test_a_row_of_a_product(inner: int, columns: int, dtype: torch.dtype) -> None:
    a, b = (torch.randn(rows, inner, device="cuda").to(dtype) for rows in (1000, columns))
    whole = product(a, b.T)
    wanted = a.double() @ b.double().T
    assert (whole.double() - wanted).norm() <= (1e-5 if dtype is torch.float32 else 1e-2) * wanted.norm()
    for first, last in ((0, 1), (1, 3), (63, 66), (500, 1000), (999, 1000)):
        assert torch.equal(product(a[first:last], b.T), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_an_element_of_a_batched_product(dtype: torch.dtype) -> None:
    a, b = torch.randn(40, 4, 128, device="cuda").to(dtype), torch.randn(40, 128, 200, device="cuda").to(dtype)
    whole = product(a, b)
    for items, columns in ((slice(3, 4), slice(0, 200)), (slice(0, 40), slice(7, 8)), (slice(5, 11), slice(64, 193))):
        assert torch.equal(product(a[items], b[items, :, columns]), whole[items, :, columns])


def test_row_sums() -> None:
    x = torch.randn(700, 5120, device="cuda")
    whole = row_sums(x)
    assert torch.allclose(whole[:, 0], x.double().sum(-1).float(), atol=1e-3)
    for first, last in ((0, 1), (3, 10), (699, 700)):
        assert torch.equal(row_sums(x[first:last]), whole[first:last])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_checkpoint(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole script; what it printed is shown where it fails."""
    arguments = ["--device", "cuda", "--dtype", dtype, "--requests", "8", "--rounds", "4", "--operators"]
    assert check_invariance.main(arguments) == 0, capsys.readouterr().out
