"""The arithmetic under batch-invariant operators: right values, and a row's bits whatever surrounds it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from deepinfer.ops.invariance import agreement, elementwise, ordered_sum, product, products, row_sums, triton

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(a: Tensor, b: Tensor) -> Tensor:
    return a.double() @ b.double()


def near(found: Tensor, wanted: Tensor) -> bool:
    bound = 1e-5 if found.dtype is torch.float32 else 2e-2
    return (found.double() - wanted).norm() <= bound * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@given(st.integers(0, 300), st.sampled_from([(64, 6), (96, 33), (31, 24)]), st.booleans(), st.data())
@settings(max_examples=25)
def test_a_row_of_a_product(
    dtype: torch.dtype, rows: int, shape: tuple[int, int], turned: bool, data: st.DataObject
) -> None:
    """Of one matrix: any part of the rows gets what it gets among all."""
    a, b = random(rows, shape[0], dtype=dtype), random(*shape, seed=1, dtype=dtype)
    b = b.T.contiguous().T if turned else b
    whole = product(a, b)
    assert whole.shape == (rows, shape[1])
    assert near(whole, exact(a, b))
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, min(rows, first + 20)))
    assert torch.equal(product(a[first:last], b), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("turned", [True, False], ids=["NT", "NN"])
@pytest.mark.parametrize(("rows", "inner"), [(1, 4), (2, 32), (4, 64), (6, 133)], ids=str)
def test_an_element_of_a_batched_product(rows: int, inner: int, turned: bool, dtype: torch.dtype) -> None:
    """Neither further items nor further columns nor its place among them change an element."""
    a = random(23, rows, inner, dtype=dtype)
    b = random(23, inner, 200, seed=1, dtype=dtype)
    b = b.transpose(1, 2).contiguous().transpose(1, 2) if turned else b
    whole = product(a, b)
    assert near(whole, exact(a, b))
    for items, columns in ((slice(3, 4), slice(0, 200)), (slice(0, 23), slice(7, 8)), (slice(5, 11), slice(64, 193))):
        assert torch.equal(product(a[items], b[items, :, columns]), whole[items, :, columns])


def test_no_rows_items_or_columns() -> None:
    assert product(random(0, 8), random(8, 3)).shape == (0, 3)
    assert product(random(0, 2, 8), random(0, 8, 64)).shape == (0, 2, 64)


def test_shapes_that_disagree_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose rows of eight differ by their place, and that sums rows of four in another order."""
    honest = torch.mm

    def library(a: Tensor, b: Tensor) -> Tensor:
        out = honest(a.double(), b.double()).float()
        if len(a) == 8:
            out[3] += 1e-6
        return out + 1e-6 if len(a) == 4 else out

    monkeypatch.setattr(torch, "mm", library)
    layout = agreement.layout_of(random(16, 7))
    agreement.agreeing_rows.cache_clear()
    try:
        assert agreement.agreeing_rows((1, 2, 4, 8, 16, 32), layout, 1) == (1, 2, 16, 32)
    finally:
        agreement.agreeing_rows.cache_clear()


def test_where_nothing_agrees_rows_and_elements_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "agreeing_rows", lambda *_: ())
    monkeypatch.setattr(products, "items_agree", lambda *_: False)
    for cached in (products._row_pieces, products._column_pieces, products._item_pieces):
        cached.cache_clear()
    try:
        a, b = random(5, 48), random(48, 9, seed=1)
        assert products._row_pieces(5, agreement.layout_of(b), 1) == ((1, 1),) * 5
        assert near(product(a, b), exact(a, b))
        several, others = random(3, 2, 48), random(3, 48, 9, seed=1)
        whole = product(several, others)
        assert near(whole, exact(several, others))
        assert torch.equal(product(several[1:2], others[1:2]), whole[1:2])
    finally:
        for cached in (products._row_pieces, products._column_pieces, products._item_pieces):
            cached.cache_clear()


@given(
    st.integers(0, 5000),
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 16, 64, 100, 256]), min_size=1, unique=True).map(sorted),
    st.sampled_from([0, 1 / 3]),
)
def test_pieces_cover_everything(count: int, sizes: list[int], waste: float) -> None:
    pieces = products._pieces(count, sizes, waste)
    assert sum(used for used, _ in pieces) == count
    assert all(size in sizes and 0 < used <= size for used, size in pieces)
    assert all(used == size for used, size in pieces[:-1])
    assert products._pieces(count, []) == ()


@pytest.mark.parametrize("function", [Tensor.exp, Tensor.sigmoid, torch.cos, functional.silu, functional.softplus])
@pytest.mark.parametrize("count", [1, 7, 31, 33, 100, 40_000])
def test_an_element_whatever_its_place(function: object, count: int) -> None:
    x = random(count)
    whole = elementwise(function, x)
    assert torch.allclose(whole, function(x.double()).float(), rtol=1e-6)
    for first in (0, count // 2, count - 1):
        assert torch.equal(elementwise(function, x[first:]), whole[first:])
    assert elementwise(function, x.view(-1, 1)).shape == (count, 1)


def test_sums() -> None:
    x = random(9, 1000)
    whole = row_sums(x)
    assert torch.allclose(whole[:, 0], x.sum(-1), atol=1e-4)
    assert all(torch.equal(row_sums(x[row : row + 1]), whole[row : row + 1]) for row in range(9))
    long = random(2, 40_000)
    assert torch.allclose(row_sums(long)[:, 0], long.double().sum(-1).float(), atol=1e-2)
    assert torch.equal(ordered_sum(x, 0), sum(x[1:], x[0]))
    assert torch.equal(ordered_sum(x[:1], 0), x[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's tests run the kernels themselves")
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_kernels_in_the_interpreter(dtype: torch.dtype) -> None:
    """Values only: the order of a sum is NumPy's there."""
    a, b = random(70, 40, dtype=dtype), random(65, 40, seed=1, dtype=dtype).T
    whole = triton.product(a, b)
    assert whole.shape == (70, 65)
    assert near(whole, exact(a, b))
    several = random(3, 2, 40, dtype=dtype), random(3, 40, 20, seed=1, dtype=dtype)
    assert near(triton.product(*several), exact(*several))
    shared = b.expand(2, -1, -1)
    assert near(triton.product(a.view(2, 35, 40), shared).view(70, 65), exact(a, b))
    assert triton.product(a[:0], b).shape == (0, 65)
    x = random(3, 2500)
    assert torch.allclose(triton.row_sums(x)[:, 0], x.sum(-1), atol=1e-4)
