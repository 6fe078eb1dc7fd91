"""Probabilities as pairs of 16-bit floats in a register each.

As a tensor of 16-bit floats P would cross a loop's end one by one, to be put together again there;
as float32 it takes twice the registers. M query rows, N keys, J pairs of neighbouring keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import inline_asm


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


@gluon.constexpr_function
def _store_pairs(outputs, inputs):
    """Assembly: four 8 x 8 matrices at a time, of the warp's 16 rows and 16 columns. A row has 128
    bytes for 64 columns, whose sixteens are permuted by its place among eight (the 128-byte
    swizzle); 64 further columns lie behind all 64 rows."""
    values, place = inputs[0], inputs[1][0]
    lines = [
        "{ .reg .b32 t, row, first, flip, base, at;",
        "mov.u32 t, %tid.x; and.b32 t, t, 127; and.b32 row, t, 15;",
        "shr.u32 first, t, 1; and.b32 first, first, 48;",
        f"add.u32 row, row, first; shl.b32 base, row, 7; add.u32 base, base, {place};",
        # Lanes from 16 on have addresses of the second eight columns.
        "shr.u32 at, t, 4; and.b32 at, at, 1; and.b32 flip, t, 7; xor.b32 flip, flip, at;",
        "shl.b32 flip, flip, 4;",
    ]
    for i in range(len(values) // 4):
        four = ", ".join(values[4 * i : 4 * i + 4])
        lines.append(f"xor.b32 at, flip, {i % 4 * 32}; add.u32 at, at, base;")
        lines.append(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [at+{i // 4 * 8192}], {{{four}}};")
    return " ".join(lines) + " }"


@gluon.jit
def store_pairs(memory, p_MJ):
    """Stores (M, N) 16-bit floats of 64 rows, as pairs in the order of a product's registers, where
    rows are swizzled by 128 bytes. Around it the compiler puts no barriers: others' reads of the
    memory are the caller's to wait for."""
    inline_asm(_store_pairs, ("r", "r"), [p_MJ, memory])
