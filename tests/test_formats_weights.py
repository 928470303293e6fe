"""The three weight layouts: packing, scales, round trips, against the golden checkpoint and a scalar definition."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from released_config import CHECKPOINT
from safetensors.torch import load_file
from scalar_formats import E2M1, E4M3, nearest, power_of_two
from torch import Tensor

from deepinfer.checkpoint import formats

Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
Dequantize = Callable[[Tensor, Tensor], Tensor]
CODECS = {
    "fp8_blocks": (formats.quantize_fp8_blocks, formats.dequantize_fp8_blocks, formats.fp8_blocks_round_trip),
    "fp8_rows": (formats.quantize_fp8_rows, formats.dequantize_fp8_rows, formats.fp8_rows_round_trip),
    "fp4_rows": (formats.quantize_fp4_rows, formats.dequantize_fp4_rows, formats.fp4_rows_round_trip),
}
every_codec = pytest.mark.parametrize(("quantize", "dequantize", "round_trip"), CODECS.values(), ids=CODECS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scale_bytes(scale: Tensor) -> Tensor:
    assert scale.dtype == torch.float8_e8m0fnu
    return scale.view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_fp8_blocks_example() -> None:
    """448 fills its block's scale of 1; one value above takes the next power of two; blocks do not mix."""
    w = torch.zeros(33, 64)
    w[0, 0], w[5, 31] = 448.0, -3.3
    w[31, 32] = 449.0
    w[32, 0] = 2.0**-20
    q, scale = formats.quantize_fp8_blocks(w)
    assert q.dtype == torch.float8_e4m3fn
    assert q.shape == (33, 64)
    assert scale_bytes(scale).tolist() == [[127, 128], [127 - 28, 1]]
    assert q[5, 31].item() == -3.25
    assert q[32, 0].item() == 256.0
    assert formats.dequantize_fp8_blocks(q, scale)[31, 32].item() == 448.0


def test_fp4_packing_example() -> None:
    """The even column lies in the low nibble; the sign is the nibble's high bit."""
    w = torch.zeros(1, 64)
    w[0, :6] = torch.tensor([6.0, -0.5, 3.0, 4.0, -0.0, -6.0])
    w[0, 32:34] = torch.tensor([12.0, -24.0])
    q, scale = formats.quantize_fp4_rows(w)
    assert q.dtype == torch.int8
    assert q.shape == (1, 32)
    assert q.view(torch.uint8)[0, :4].tolist() == [0x97, 0x65, 0xF8, 0x00]
    assert q.view(torch.uint8)[0, 16].item() == 0xF5  # scale 4: 3 and -6
    assert scale_bytes(scale).tolist() == [[127, 129]]
    assert torch.equal(formats.dequantize_fp4_rows(q, scale), w)


def test_fp8_rows_example() -> None:
    w = torch.zeros(2, 64)
    w[0, 3], w[0, 40], w[1, 0] = 1.0, 900.0, -0.07
    q, scale = formats.quantize_fp8_rows(w)
    assert q.shape == (2, 64)
    assert scale_bytes(scale).tolist() == [[127 - 8, 129], [127 - 12, 1]]
    assert q[0, 3].item() == 256.0
    assert q[1, 0].item() == nearest(-0.07 * 4096, E4M3)


@pytest.mark.parametrize("exponent", [-126, -100, -9, 0, 1, 60, 119])
def test_every_e4m3_code_survives(exponent: int) -> None:
    """Each block holds the largest value, so its scale is determined, and every finite code."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert values[:127].tolist() == E4M3
    rows = torch.cat([values, torch.tensor([448.0, -448.0])]).reshape(8, 32) * 2.0**exponent
    rows[:, -1] = 448.0 * 2.0**exponent
    for quantize, dequantize, _ in (CODECS["fp8_rows"], CODECS["fp8_blocks"]):
        q, scale = quantize(rows)
        assert set(scale_bytes(scale).flatten().tolist()) == {127 + exponent}
        assert same_bits(dequantize(q, scale), rows)
        assert same_bits(q.float(), (rows / 2.0**exponent))


@pytest.mark.parametrize("exponent", [-126, -100, -9, 0, 1, 60, 125])
def test_every_e2m1_code_survives_in_both_nibbles(exponent: int) -> None:
    packed = torch.arange(256, dtype=torch.int16).to(torch.uint8).reshape(16, 16).view(torch.int8).clone()
    scale = torch.full((16, 1), 127 + exponent, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = formats.dequantize_fp4_rows(packed, scale)
    expected = [
        E2M1[nibble & 7] * 2.0**exponent * (-1 if nibble >= 8 else 1)
        for byte in packed.view(torch.uint8).flatten().tolist()
        for nibble in (byte & 15, byte >> 4)
    ]
    assert same_bits(values, torch.tensor(expected).reshape(16, 32))
    again, again_scale = formats.quantize_fp4_rows(values)
    assert same_bits(again, packed)
    assert same_bits(again_scale, scale)


@every_codec
def test_zero_blocks_have_a_valid_scale(quantize: Quantize, dequantize: Dequantize, round_trip: Callable) -> None:
    w = torch.zeros(64, 64)
    w[1::2] = -0.0
    q, scale = quantize(w)
    assert set(scale_bytes(scale).flatten().tolist()) == {1}  # 2^-126; byte 255 would be NaN
    assert same_bits(dequantize(q, scale), w)
    assert same_bits(round_trip(w), w)


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_round_trip_is_quantise_then_dequantise(
    quantize: Quantize, dequantize: Dequantize, round_trip: Callable, dtype: torch.dtype
) -> None:
    w = (random(40, 96) * torch.logspace(-6, 3, 40)[:, None]).to(dtype)
    q, scale = quantize(w)
    values = dequantize(q, scale)
    assert values.dtype == torch.float32
    assert same_bits(round_trip(w), values)


@every_codec
def test_values_are_idempotent(quantize: Quantize, dequantize: Dequantize, round_trip: Callable) -> None:
    """Codes and scale may move together once (224 x 2 is 448 x 1), values never do."""
    w = random(256, 320) * torch.logspace(-8, 4, 256)[:, None]
    once = dequantize(*quantize(w))
    q, scale = quantize(once)
    assert same_bits(dequantize(q, scale), once)
    q_again, scale_again = quantize(dequantize(q, scale))
    assert same_bits(q_again, q)
    assert same_bits(scale_again, scale)


@settings(deadline=None, max_examples=40)
@given(
    row=st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32),
    exponent=st.integers(-100, 60),
)
def test_rows_agree_with_the_scalar_definition(row: list[float], exponent: int) -> None:
    w = torch.tensor([row]) * 2.0**exponent
    amax = w.abs().max()
    for levels, top, codec in ((E4M3, 448.0, "fp8_rows"), (E2M1, 6.0, "fp4_rows")):
        scale = power_of_two((amax.clamp(min=top * 2.0**-126) / top).item())
        expected = torch.tensor([[nearest(value / scale, levels) * scale for value in w[0].tolist()]])
        quantize, dequantize, _ = CODECS[codec]
        q, stored_scale = quantize(w)
        assert stored_scale.float().item() == scale
        assert same_bits(dequantize(q, stored_scale), expected)


@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (32, 32), (33, 96), (100, 50)], ids=str)
def test_fp8_blocks_of_ragged_shapes(shape: tuple[int, int]) -> None:
    """Edge blocks are short, and each block is what it would be alone."""
    w = random(*shape)
    q, scale = formats.quantize_fp8_blocks(w)
    assert q.shape == shape
    assert scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    values = formats.dequantize_fp8_blocks(q, scale)
    assert values.shape == shape
    for row in range(0, shape[0], 32):
        for column in range(0, shape[1], 32):
            block = w[row : row + 32, column : column + 32]
            q_alone, scale_alone = formats.quantize_fp8_blocks(block)
            assert same_bits(q[row : row + 32, column : column + 32], q_alone)
            assert scale[row // 32, column // 32].float() == scale_alone.float().squeeze()


def test_fp4_rows_take_leading_dimensions() -> None:
    w = random(3, 2, 5, 64)
    q, scale = formats.quantize_fp4_rows(w)
    assert q.shape == (3, 2, 5, 32)
    assert scale.shape == (3, 2, 5, 2)
    values = formats.dequantize_fp4_rows(q, scale)
    assert same_bits(values, formats.fp4_rows_round_trip(w))
    q_one, scale_one = formats.quantize_fp4_rows(w[1, 1])
    assert same_bits(values[1, 1], formats.dequantize_fp4_rows(q_one, scale_one))


@every_codec
def test_views_that_are_not_contiguous(quantize: Quantize, dequantize: Dequantize, round_trip: Callable) -> None:
    w = random(64, 96)
    for found, expected in zip(quantize(w.T), quantize(w.T.contiguous()), strict=True):
        assert found.is_contiguous()
        assert same_bits(found, expected)
    assert same_bits(round_trip(w.T), round_trip(w.T.contiguous()))


@pytest.mark.parametrize(
    ("codec", "relative"), [("fp8_blocks", 1 / 16), ("fp8_rows", 1 / 16), ("fp4_rows", 1 / 4)], ids=str
)
def test_relative_error_of_values_near_the_top(codec: str, relative: float) -> None:
    """E4M3 keeps 3 mantissa bits (half a step is 1/16), E2M1 one (1/4); nothing saturates."""
    w = (3 + 3 * random(64, 64).sigmoid()) * torch.where(random(64, 64, seed=1) < 0, -1.0, 1.0)
    error = (CODECS[codec][2](w) - w).abs() / w.abs()
    assert error.max() <= relative
    assert error.max() > relative / 2


@every_codec
def test_compiles_without_graph_breaks(quantize: Quantize, dequantize: Dequantize, round_trip: Callable) -> None:
    w = random(32, 64)
    compiled = torch.compile(lambda w: (*quantize(w), round_trip(w)), backend="eager", fullgraph=True)
    for found, expected in zip(compiled(w), (*quantize(w), round_trip(w)), strict=True):
        assert same_bits(found, expected)


def golden_quantized() -> list[tuple[str, Tensor, Tensor]]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(CHECKPOINT.glob("*.safetensors")):
        tensors |= load_file(file)
    return [
        (name, tensor, tensors[name.removesuffix("weight") + "scale"])
        for name, tensor in tensors.items()
        if name.removesuffix("weight") + "scale" in tensors
    ]


def test_golden_weights_decode_by_definition_and_survive_requantising() -> None:
    tensors = golden_quantized()
    assert len(tensors) == 520
    for name, q, scale in tensors:
        codec = "fp4_rows" if q.dtype == torch.int8 else "fp8_rows" if "engram.embed" in name else "fp8_blocks"
        quantize, dequantize, round_trip = CODECS[codec]
        values = dequantize(q, scale)
        row, column = values.shape[0] - 1, values.shape[1] - 2
        factor = 2.0 ** (scale_bytes(scale)[row // 32 if codec == "fp8_blocks" else row, column // 32].item() - 127)
        if codec == "fp4_rows":
            code = q.view(torch.uint8)[row, column // 2].item() & 15
            assert values[row, column].item() == E2M1[code & 7] * (-1 if code & 8 else 1) * factor, name
        else:
            assert values[row, column].item() == q[row, column].float().item() * factor, name
        assert same_bits(dequantize(*quantize(values)), values), name
        assert same_bits(round_trip(values), values), name
