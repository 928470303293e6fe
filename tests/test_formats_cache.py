"""The three cache round trips, against the golden cases and against a scalar definition in exact arithmetic."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from released_config import GOLDEN
from safetensors.torch import load_file
from scalar_formats import E2M1, E4M3, nearest, power_of_two
from torch import Tensor

from deepinfer.checkpoint import formats

ROUND_TRIPS = [formats.window_fp8, formats.latent_nvfp4, formats.index_mxfp4]
NAMES = [f.__name__ for f in ROUND_TRIPS]
every_round_trip = pytest.mark.parametrize("round_trip", ROUND_TRIPS, ids=NAMES)
RoundTrip = Callable[[Tensor], Tensor]


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def scalar_round_trip(name: str, row: list[float]) -> list[float]:
    """One block after another, one value after another, in Python floats (which hold FP32 quotients exactly enough)."""
    size = 16 if name == "latent_nvfp4" else 32
    out = []
    for start in range(0, len(row), size):
        block = row[start : start + size]
        amax = max(abs(value) for value in block)
        if name == "window_fp8":
            levels, scale = E4M3, power_of_two(fp32(max(amax, fp32(1e-4)) / 448))
        elif name == "index_mxfp4":
            levels, scale = E2M1, power_of_two(fp32(max(amax, 6 * 2.0**-126) / 6))
        else:
            levels, scale = E2M1, nearest(fp32(max(amax, 6 * 2.0**-9) / 6), E4M3)
        out += [nearest(fp32(value / scale), levels) * scale for value in block]
    return out


def bits(x: Tensor) -> Tensor:
    """Equal bits, not just equal values: -0 is not 0."""
    return x.view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(bits(found), bits(expected))


@every_round_trip
def test_golden_cases_to_the_bit(round_trip: RoundTrip) -> None:
    cases = load_file(GOLDEN / "formats.safetensors")
    name = round_trip.__name__
    assert_same_bits(round_trip(cases[f"{name}.in"]), cases[f"{name}.out"])


finite = st.floats(-1e4, 1e4, width=32)
tiny = st.floats(-(2.0**-10), 2.0**-10, width=32)
midpoints = st.sampled_from(
    [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 464.0, 448.0, 2.0**-14, 0.0, -0.0, 2.0**-126]
)


@every_round_trip
@settings(deadline=None, max_examples=60)
@given(row=st.lists(finite | tiny | midpoints, min_size=32, max_size=32))
def test_agrees_with_the_scalar_definition(round_trip: RoundTrip, row: list[float]) -> None:
    expected = torch.tensor(scalar_round_trip(round_trip.__name__, row))
    assert_same_bits(round_trip(torch.tensor(row)), expected)


@every_round_trip
def test_every_power_of_two_scale_boundary(round_trip: RoundTrip) -> None:
    """Around each scale step: an exact power stays, the next FP32 value above it takes the next power."""
    top = 6.0 if "4" in round_trip.__name__ else 448.0
    edges = top * 2.0 ** torch.arange(-12, 8)
    for amax in (edges, torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(1e9))):
        rows = amax[:, None] * torch.linspace(-1, 1, 32)
        expected = torch.tensor([scalar_round_trip(round_trip.__name__, row.tolist()) for row in rows])
        assert_same_bits(round_trip(rows), expected)


@every_round_trip
def test_signs_of_zero_and_zero_blocks(round_trip: RoundTrip) -> None:
    zeros = torch.tensor([0.0, -0.0] * 16)
    assert_same_bits(round_trip(zeros), zeros)
    underflow = torch.tensor([1e-30, -1e-30] * 15 + [1.0, 1.0])
    assert_same_bits(round_trip(underflow)[:30], torch.tensor([0.0, -0.0] * 15))


@every_round_trip
@pytest.mark.parametrize("shape", [(32,), (0, 32), (3, 64), (2, 3, 5, 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_shape_and_dtype_and_computes_in_fp32(
    round_trip: RoundTrip, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = round_trip(x)
    assert out.shape == x.shape
    assert_same_bits(out, round_trip(x.float()).to(dtype))


@every_round_trip
def test_takes_views_that_are_not_contiguous(round_trip: RoundTrip) -> None:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))
    assert_same_bits(round_trip(x.T), round_trip(x.T.contiguous()))


@every_round_trip
@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_rows_do_not_depend_on_their_neighbours(round_trip: RoundTrip, spread: float) -> None:
    x = spread * torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    assert_same_bits(round_trip(x)[4], round_trip(x[4]))
    assert_same_bits(round_trip(x)[:, 32:], round_trip(x[:, 32:]))


@pytest.mark.parametrize("round_trip", [formats.window_fp8, formats.index_mxfp4], ids=["window_fp8", "index_mxfp4"])
def test_power_of_two_round_trips_are_idempotent(round_trip: RoundTrip) -> None:
    x = (
        torch.randn(2000, 32, generator=torch.Generator().manual_seed(4))
        * 2.0 ** torch.arange(-20, 20).repeat(50)[:, None]
    )
    once = round_trip(x)
    assert_same_bits(round_trip(once), once)


@every_round_trip
def test_error_is_within_half_a_step(round_trip: RoundTrip) -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(5))
    error = (round_trip(x) - x).abs()
    amax = x.unflatten(-1, (-1, 16 if "nvfp4" in round_trip.__name__ else 32)).abs().amax(-1, keepdim=True)
    # E4M3 has 8 steps an octave and scales may waste an octave; E2M1's widest step is 2 of 6.
    bound = amax / 14 if round_trip is formats.window_fp8 else amax / 3
    assert bool((error.unflatten(-1, (amax.shape[1], -1)) <= bound).all())
    assert error.mean() > 0


@every_round_trip
def test_nan_is_not_hidden(round_trip: RoundTrip) -> None:
    x = torch.ones(2, 32)
    x[0, 5] = torch.nan
    out = round_trip(x)
    assert out[0, 5].isnan()
    assert bool(out[1].isfinite().all())


@every_round_trip
def test_compiles_without_graph_breaks(round_trip: RoundTrip) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(6))
    compiled = torch.compile(round_trip, backend="eager", fullgraph=True)
    assert_same_bits(compiled(x), round_trip(x))
