"""Writes wgmma.cuh, one overload a shape and kind of warpgroup matrix product; run in this folder."""

KINDS = {"e4m3": (32, "e4m3.e4m3"), "f16": (16, "f16.f16"), "f16t": (16, "f16.f16")}
REGISTER_SHAPES = (("e4m3", 16), ("e4m3", 32), ("e4m3", 64), ("e4m3", 96), ("e4m3", 128), ("e4m3", 256))
SHARED_SHAPES = (("f16", 64), ("f16t", 256))
HEADER = """// Warpgroup matrix products of 64 rows: acc += A B, FP32. Made by make_wgmma.py.
//
// A lies in registers (four words) or in shared memory (a descriptor), B in shared memory, K-major (`f16t`: MN-major).
#pragma once
#include <stdint.h>
"""


def product(kind: str, columns: int, registers: bool) -> str:
    """One C++ function `mma_KIND(acc, a, descriptor_b, scale_d)`."""
    count = columns // 2
    depth, types = KINDS[kind]
    accumulators = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    words = 4 if registers else 1
    operand = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if registers else f"%{count}"
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if registers else '"l"(a)'
    transpose = (
        ""
        if kind == "e4m3"
        else (", 1" if kind == "f16t" else ", 0")
        if registers
        else ", 0" + (", 1" if kind == "f16t" else ", 0")
    )
    argument = "const uint32_t* a" if registers else "uint64_t a"
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{types}"
    return f"""
__device__ __forceinline__ void mma_{kind}(float (&d)[{count}], {argument}, uint64_t b, int scale_d) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + words + 1}, 0;\\n"
    "{name} {{{accumulators}}}, {operand}, %{count + words}, p, 1, 1{transpose};\\n}}"
    : {outputs} : {inputs}, "l"(b), "r"(scale_d));
}}
"""


if __name__ == "__main__":
    with open("wgmma.cuh", "w", encoding="ascii") as file:
        file.write(HEADER)
        file.writelines(product(kind, columns, True) for kind, columns in REGISTER_SHAPES)
        file.writelines(product(kind, columns, False) for kind, columns in SHARED_SHAPES)
