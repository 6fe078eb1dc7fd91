"""Latent vectors of 8 bits in shared memory, and how they become left operands of products.

A thread loads pairs of columns as numbers of 16 bits, in the layout of a left operand: by ldmatrix,
which moves numbers of 16 bits. Conversion makes two operands of float16 from one of pairs, without
an exchange between threads. float16 holds every e4m3, and one instruction converts two.

    as keys    a register has the pairs 2 j and 2 j + 1 of a key: columns 4 j to 4 j + 3. One
               operand has columns 4 j and 4 j + 1, the other 4 j + 2 and 4 j + 3. Queries lie in
               this order, too (`converting_consumer.query_box`).
    as values  a register has pair j of keys n and n + 1. One operand has column 2 j of both, the
               other column 2 j + 1: even and odd columns of the output.

N keys, C pairs of columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.mla.boxes import KEYS, WIDTH
from heedful.kernels.hopper.sm90.compat import aggregate, reinterpret
from heedful.kernels.hopper.sm90.pipeline import Pipeline

COLUMNS: gl.constexpr = gl.constexpr(128)  # of a group of values, which rows of bytes scale by one
GROUPS: gl.constexpr = gl.constexpr(4)
WARPS: gl.constexpr = gl.constexpr(4)  # which release a box


@aggregate
class StoredKeys:
    """Rings of stored keys. values: four groups of 128 columns for each block of 64 keys. rest: the
    columns past the values, of 8 bits or of 16. scales: (stages, keys, groups), which come with the
    rest, or None."""

    values: Pipeline
    rest: Pipeline
    scales: gl.shared_memory_descriptor | gl.constexpr

    @gluon.jit
    def allocate(
        dtype: gl.constexpr, of_rest: gl.constexpr, STAGES: gl.constexpr, SCALED: gl.constexpr
    ):
        values = Pipeline.of_tiles(dtype, KEYS, COLUMNS, STAGES * GROUPS, WARPS)
        rest = Pipeline.of_tiles(of_rest, KEYS, WIDTH, STAGES, WARPS)
        scales = None
        if SCALED:
            plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            scales = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS, GROUPS], plain)
        return StoredKeys(values, rest, scales)


@gluon.jit
def pairs_of(box):
    """A box of 8 bits as pairs of columns."""
    PAIRS: gl.constexpr = box.shape[-1] // 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PAIRS], gl.int16)
    return reinterpret(box, gl.int16, [KEYS, PAIRS], layout)


@gluon.jit
def as_keys(pairs_NC):
    """Two left operands (keys, half of the columns) from pairs of columns."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2;\n"
        "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r",
        [pairs_NC],
        (gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def as_values(pairs_CN):
    """Two left operands, (even columns, keys) and (odd columns, keys), from pairs of columns."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .b32 t; prmt.b32 t, $2, $2, 0x3120; mov.b32 {a, b}, t;\n"
        "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
        "=r,=r,r",
        [pairs_CN],
        (gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def scaled_as_keys(pairs_NC, scale_N1):
    """As `as_keys`, each key times its scale in float16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $2;\n"
        "cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;\n"
        "mul.rn.f16x2 $0, x, $3; mul.rn.f16x2 $1, y, $3; }",
        "=r,=r,r,r",
        [pairs_NC, scale_N1],
        (gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def scaled_as_values(pairs_CN, scale_1N):
    """As `as_values`, each key times its scale in float16."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .b32 t, x, y; prmt.b32 t, $2, $2, 0x3120; mov.b32 {a, b}, t;\n"
        "cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;\n"
        "mul.rn.f16x2 $0, x, $3; mul.rn.f16x2 $1, y, $3; }",
        "=r,=r,r,r",
        [pairs_CN, scale_1N],
        (gl.float16, gl.float16),
        True,
        2,
    )
