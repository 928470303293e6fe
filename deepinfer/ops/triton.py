"""What the Triton kernels share.

A kernel converts BF16 to FP32 right after a load: Triton's CPU interpreter, in which the tests run them, computes with
BF16 wrongly. For the same reason `dot` widens its operands there.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run on the CPU, step by step (TRITON_INTERPRET=1)."""

_WIDE = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """acc + a b, sums in FP32."""
    if _WIDE:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def narrow(x):
    """FP32 rounded to BF16, as FP32. The interpreter's own cast cuts off."""
    if _WIDE:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def to_e4m3(x):
    """FP32 of magnitude up to 448 to E4M3, ties to even; the interpreter's cast is right for E4M3 numbers only."""
    if _WIDE:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        small = x + 24576.0 - 24576.0  # 1.5 * 2^14 leaves steps of 2^-9
        return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float8e4nv)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def power_above(x):
    """Biased exponent (int32) of the smallest power of two >= x, for normal FP32 x > 0."""
    return (x.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def from_power(power):
    """Biased exponents (int32) to FP32 powers of two."""
    return (power << 23).to(tl.float32, bitcast=True)


@triton.jit
def cosine(x):
    """Of FP32 angles of any size, as PyTorch's."""
    return tl.cos(x) if _WIDE else libdevice.cos(x)


@triton.jit
def sine(x):
    """Of FP32 angles of any size, as PyTorch's."""
    return tl.sin(x) if _WIDE else libdevice.sin(x)


@triton.jit
def row_scale(x):
    """The power of two with which a row of FP32 fits E4M3."""
    return from_power(power_above(tl.maximum(tl.max(tl.abs(x), 0), 7.888609052210118e-31) / 448.0))


@triton.jit
def e2m1_round(x):
    """FP32 to the nearest E2M1 value, ties to the even code, saturating."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    steps = tl.where(magnitude < 2.0, 2.0, tl.where(magnitude < 4.0, 1.0, 0.5))  # of a unit
    step = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    rounded = (magnitude * steps + 12582912.0 - 12582912.0) * step  # adding 1.5 * 2^23 leaves no fraction bits
    return tl.where(x < 0.0, -rounded, rounded)


def block(count: int) -> int:
    """The power of two that holds `count` elements."""
    return triton.next_power_of_2(count)
