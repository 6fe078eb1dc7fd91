"""Probabilities as pairs of 16-bit floats in a register each.

As a tensor of 16-bit floats P would cross a loop's end one by one, to be put together again there;
as float32 it takes twice the registers. M query rows, N keys, J pairs of neighbouring keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def to_pairs(p_MN, dtype: gl.constexpr):
    """Rounds (M, N) to (M, N / 2) int32, the lower key in the lower half."""
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    even_MJ, odd_MJ = p_MN.reshape([M, N // 2, 2]).split()
    convert: gl.constexpr = "cvt.rn.bf16x2.f32" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32"
    return gl.inline_asm_elementwise(
        convert + " $0, $2, $1;", "=r,f,f", [even_MJ, odd_MJ], gl.int32, True, 1
    )


@gluon.jit
def from_pairs(p_MJ, dtype: gl.constexpr, layout: gl.constexpr):
    """The (M, N) tensor again, in the layout of a product's left operand."""
    even_MJ, odd_MJ = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p_MJ], (gl.int16, gl.int16), True, 1
    )
    p_MN = gl.join(even_MJ, odd_MJ).reshape([p_MJ.shape[0], p_MJ.shape[1] * 2])
    return gl.convert_layout(p_MN.to(dtype, bitcast=True), layout)


@gluon.jit
def bfloat16_pairs(p_MJ):
    """Pairs of float16 as pairs of bfloat16."""
    text: gl.constexpr = """{
        .reg .b16 low, high;
        .reg .f32 even, odd;
        mov.b32 {low, high}, $1;
        cvt.f32.f16 even, low;
        cvt.f32.f16 odd, high;
        cvt.rn.bf16x2.f32 $0, odd, even;
    }"""
    return gl.inline_asm_elementwise(text, "=r,r", [p_MJ], gl.int32, True, 1)
