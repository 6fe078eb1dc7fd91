"""Packs probabilities, or gradients of scores, as two 16-bit floats in one register.

M query rows, N keys, J pairs of neighbouring keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import inline_asm


@gluon.jit
def to_pairs(p_MN, dtype: gl.constexpr):
    """Rounds (M, N) to 16 bits and packs it as (M, N / 2) int32, the lower key in the
    lower half."""
    # ptxas: 16-bit floats would be carried through a loop one by one; float32 would take twice the
    # registers.
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    even_MJ, odd_MJ = p_MN.reshape([M, N // 2, 2]).split()
    convert: gl.constexpr = "cvt.rn.bf16x2.f32" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32"
    return gl.inline_asm_elementwise(
        convert + " $0, $2, $1;", "=r,f,f", [even_MJ, odd_MJ], gl.int32, True, 1
    )


@gluon.jit
def from_pairs(p_MJ, dtype: gl.constexpr, layout: gl.constexpr):
    """Unpacks pairs to (M, N), in the layout of a product's left operand."""
    even_MJ, odd_MJ = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p_MJ], (gl.int16, gl.int16), True, 1
    )
    p_MN = gl.join(even_MJ, odd_MJ).reshape([p_MJ.shape[0], p_MJ.shape[1] * 2])
    return gl.convert_layout(p_MN.to(dtype, bitcast=True), layout)


@gluon.jit
def bfloat16_pairs(p_MJ):
    """Converts pairs of float16 to pairs of bfloat16."""
    text: gl.constexpr = """{
        .reg .b16 low, high;
        .reg .f32 even, odd;
        mov.b32 {low, high}, $1;
        cvt.f32.f16 even, low;
        cvt.f32.f16 odd, high;
        cvt.rn.bf16x2.f32 $0, odd, even;
    }"""
    return gl.inline_asm_elementwise(text, "=r,r", [p_MJ], gl.int32, True, 1)


@gluon.jit
def lane_place():
    """The offset in bytes at which a thread stores its first row in `store_pairs`. It differs
    between lanes, though the compiler treats it as one number of the warp."""
    return inline_asm(
        """{ .reg .b32 t, row, flip;
        mov.u32 t, %tid.x; and.b32 flip, t, 15; shr.u32 row, t, 1; and.b32 row, row, 48;
        add.u32 row, row, flip; shl.b32 row, row, 7;
        shr.u32 flip, t, 4; and.b32 flip, flip, 1; and.b32 t, t, 7; xor.b32 flip, flip, t;
        shl.b32 flip, flip, 4; add.u32 $0, row, flip; }""",
        "=r",
        [],
        gl.int32,
    )


@gluon.constexpr_function
def _store_pairs(outputs, inputs):
    """Assembly that stores four 8 x 8 matrices at a time: 16 columns of the warp's 16 rows. A row
    of 64 columns has 128 bytes. Its 16-byte pieces are permuted by the row's number modulo eight
    (the 128-byte swizzle)."""
    values, memory, lane = inputs[0], inputs[1][0], inputs[2][0]
    lines = [f"{{ .reg .b32 base, at; add.u32 base, {memory}, {lane};"]
    for i in range(0, len(values), 4):
        four = ", ".join(values[i : i + 4])
        lines.append(f"xor.b32 at, base, {i * 8};")
        lines.append(f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [at], {{{four}}};")
    return " ".join(lines) + " fence.proxy.async.shared::cta; }"


@gluon.jit
def store_pairs(memory, x_MJ, lane):
    """Stores 64 x 64 16-bit floats in the layout that TMA and products expect; they see it after
    the next barrier. The caller must wait until others have read the memory: unlike its own stores,
    the compiler puts no barrier of the warpgroup before this one. lane: `lane_place()`."""
    inline_asm(_store_pairs, ("r", "r", "r"), [x_MJ, memory, lane])
