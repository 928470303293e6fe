"""Stored cache rows: their bytes, by hand and against the round trips of the checkpoint's formats."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from released_config import GOLDEN
from safetensors.torch import load_file
from torch import Tensor

from deepinfer.checkpoint import formats
from deepinfer.ops import kv_formats


@dataclass(frozen=True)
class Format:
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, torch.dtype], Tensor]
    round_trip: Callable[[Tensor], Tensor]
    size: Callable[[int], int]
    block: int
    name: str


WINDOW = Format(
    kv_formats.pack_window, kv_formats.unpack_window, formats.window_fp8, kv_formats.window_bytes, 32, "window_fp8"
)
LATENT = Format(
    kv_formats.pack_latent, kv_formats.unpack_latent, formats.latent_nvfp4, kv_formats.latent_bytes, 16, "latent_nvfp4"
)
INDEX = Format(
    kv_formats.pack_index, kv_formats.unpack_index, formats.index_mxfp4, kv_formats.index_bytes, 32, "index_mxfp4"
)
FORMATS = [WINDOW, LATENT, INDEX]
every_format = pytest.mark.parametrize("f", FORMATS, ids=[f.name for f in FORMATS])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rows(count: int, channels: int, spread: float = 1.0, seed: int = 0) -> Tensor:
    return spread * torch.randn(count, channels, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal bits, not just equal values: -0 is not 0."""
    assert found.dtype == expected.dtype
    integer = {2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    assert torch.equal(found.contiguous().view(integer), expected.contiguous().view(integer))


@every_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.0, 1e-38, 1e-30, 1e-6, 1e-3, 1.0, 300.0])
def test_unpacking_gives_the_round_trip_to_the_bit(f: Format, dtype: torch.dtype, spread: float) -> None:
    x = rows(200, 96, spread).to(dtype)
    assert_same_bits(f.unpack(f.pack(x), dtype), f.round_trip(x))


@every_format
def test_golden_cases_to_the_bit(f: Format) -> None:
    cases = load_file(GOLDEN / "formats.safetensors")
    x = cases[f"{f.name}.in"]
    assert_same_bits(f.unpack(f.pack(x), x.dtype), cases[f"{f.name}.out"])


values = (
    st.floats(-1e4, 1e4, width=32)
    | st.floats(-(2.0**-10), 2.0**-10, width=32)
    | st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 464.0, 448.0, 2.0**-14, 0.0, -0.0, 2.0**-126])
)


@every_format
@settings(deadline=None, max_examples=150)
@given(row=st.lists(values, min_size=32, max_size=32))
def test_any_row_to_the_bit(f: Format, row: list[float]) -> None:
    x = torch.tensor(row)
    assert_same_bits(f.unpack(f.pack(x), torch.float32), f.round_trip(x))


@every_format
def test_every_scale_boundary_and_every_midpoint(f: Format) -> None:
    """Amplitudes around each power of two, with elements at and next to the midpoints between all levels."""
    steps = torch.cat((torch.arange(-12, 12.5, 0.5), torch.arange(16, 449.0, 8))) / 448
    for top in (6.0, 448.0):
        edges = top * 2.0 ** torch.arange(-20, 10)
        for amax in (edges, torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(1e9))):
            x = amax[:, None] * torch.cat((torch.ones(1), steps, torch.zeros(-(len(steps) + 1) % 32)))
            assert_same_bits(f.unpack(f.pack(x), torch.float32), f.round_trip(x))
            for side in (0.0, 1e9):
                near = torch.nextafter(x, torch.tensor(side))
                assert_same_bits(f.unpack(f.pack(near), torch.float32), f.round_trip(near))


@every_format
@pytest.mark.parametrize("shape", [(32,), (0, 64), (1, 512), (3, 5, 96)], ids=str)
def test_bytes_of_a_row(f: Format, shape: tuple[int, ...]) -> None:
    stored = f.pack(torch.ones(shape))
    assert stored.dtype == torch.uint8
    assert stored.shape == (*shape[:-1], f.size(shape[-1]))
    assert f.unpack(stored, torch.float32).shape == shape


def test_bytes_of_the_released_rows() -> None:
    assert (kv_formats.window_bytes(512), kv_formats.latent_bytes(512), kv_formats.index_bytes(128)) == (528, 288, 68)


def test_a_window_row_by_hand() -> None:
    x = torch.zeros(64)
    x[0], x[1], x[31] = 448.0, -1.0, 1.0625
    x[32], x[33] = 449.0, -0.0
    stored = kv_formats.pack_window(x)
    # E4M3 (bias 7): 448 = 2^8 * 1.75, 1 = 2^0, 1.0625 is half way from 1 to 1.125 and goes to the even code.
    assert stored[[0, 1, 31]].tolist() == [0b0_1111_110, 0b1_0111_000, 0b0_0111_000]
    # 449 takes the next scale: 224.5 is nearest to 224 = 2^7 * 1.75.
    assert stored[[32, 33]].tolist() == [0b0_1110_110, 0b1_0000_000]
    assert stored[64:].tolist() == [127, 128]  # 2^0, 2^1


def test_a_latent_row_by_hand() -> None:
    x = torch.zeros(32)
    x[0], x[1], x[2], x[3] = 6.0, -0.5, 2.5, 3.5
    x[16] = 3.0
    stored = kv_formats.pack_latent(x)
    # Codes: 6 -> 7, -0.5 -> 9, 2.5 -> 4 (2, even), 3.5 -> 6 (4, even); the even channel has the low nibble.
    assert stored[:2].tolist() == [0x97, 0x64]
    assert stored[8].item() == 0x07
    assert stored[16:].tolist() == [0b0_0111_000, 0b0_0110_000]  # E4M3 of 1 and of 1/2


def test_an_index_row_by_hand() -> None:
    x = torch.zeros(32)
    x[0], x[31] = 7.0, -3.0
    stored = kv_formats.pack_index(x)
    # Scale 2: 3.5 goes to 4 (code 6), -1.5 is code 11 in a high nibble.
    assert (stored[0].item(), stored[15].item(), stored[16].item()) == (0x06, 0xB0, 128)


@every_format
def test_every_value_is_a_bfloat16_number(f: Format) -> None:
    """Any element with any scale that a format may store: unpacking to BF16 loses nothing, subnormal or not."""
    generator = torch.Generator().manual_seed(2)
    stored = torch.randint(0, 256, (5000, f.size(64)), dtype=torch.uint8, generator=generator)
    scales = stored[:, -(64 // f.block) :]
    if f is LATENT:
        scales &= 0x7F
        scales[scales == 0x7F] = 0x7E  # NaN
    else:
        scales.clamp_(105 if f is WINDOW else 1, 254)  # 2**-22 >= 1e-4 / 448, 2**-126; 255 is NaN
    if f is WINDOW:
        stored[:, :64][stored[:, :64] & 0x7F == 0x7F] = 0
    exact = f.unpack(stored, torch.float32)
    assert not exact.isnan().any()
    assert_same_bits(f.unpack(stored, torch.bfloat16).float(), exact)


@every_format
def test_rows_do_not_depend_on_their_neighbours(f: Format) -> None:
    x = rows(7, 64, 30.0)
    stored = f.pack(x)
    assert torch.equal(stored[4], f.pack(x[4]))
    assert torch.equal(f.unpack(stored, torch.float32)[4], f.unpack(stored[4], torch.float32))


@every_format
def test_takes_views_that_are_not_contiguous(f: Format) -> None:
    x = rows(64, 6)
    stored = f.pack(x.T)
    assert torch.equal(stored, f.pack(x.T.contiguous()))
    wider = torch.zeros(6, stored.shape[1] + 3, dtype=torch.uint8)
    wider[:, 2:-1] = stored
    assert_same_bits(f.unpack(wider[:, 2:-1], torch.float32), f.unpack(stored, torch.float32))


@every_format
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_hidden(f: Format, fault: float) -> None:
    x = torch.full((2, 64), 6.0)
    x[0, 5] = fault
    out = f.unpack(f.pack(x), torch.float32)
    if f is LATENT and math.isinf(fault):  # an infinite block takes the largest E4M3 scale: it saturates
        assert out[0, 5].item() == 6 * 448 * (1 if fault > 0 else -1)
    else:
        assert not bool(out[0, 5].isfinite())
    assert bool((out[1] == 6).all())
    assert bool((out[0, f.block :] == 6).all())


@every_format
def test_every_byte_unpacks_to_something(f: Format) -> None:
    """Rows of arbitrary bytes, as in memory that nobody wrote, unpack without an error; zeros give zeros."""
    stored = torch.randint(0, 256, (500, f.size(64)), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert f.unpack(stored, torch.float32).shape == (500, 64)
    assert not f.unpack(torch.zeros_like(stored), torch.float32).any()


@every_format
def test_compiles_without_graph_breaks(f: Format) -> None:
    x = rows(4, 64)
    stored = torch.compile(f.pack, backend="eager", fullgraph=True)(x)
    assert torch.equal(stored, f.pack(x))
    unpack = torch.compile(lambda stored: f.unpack(stored, torch.float32), backend="eager", fullgraph=True)
    assert_same_bits(unpack(stored), f.round_trip(x))
