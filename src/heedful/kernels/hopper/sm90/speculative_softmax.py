"""Speculative softmax: exponentials first, then a vote whether they were safe.

Probabilities are computed against a row's old reference m as p = 2^(s - m), without the new
maximum. The softmax needs the sums of p anyway, and they show whether any p is too large. A warp
that finds one, or a row without a reference, computes its scores again from the tile in shared
memory, and moves its references. References have headroom above the maximum, so this is very rare.
It saves half an instruction for each element and the wait for the maximum, which cost the most
after the exponentials.

In fp8, a p above 448 saturates silently. A lane's sum of p over 16 keys bounds each of them: none
is above 448 while no sum is. A new reference gives the row's maximum a p of 16. So 16 equal scores
cause no false overflow, and a true overflow moves the reference.

M query rows, N keys, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.mma import ROWS, scores_layout
from heedful.kernels.hopper.sm90.softmax import exponentials, scale_rows, shift_of

# log2 of the largest probability of a row of fp8 whose reference has just moved. A power of two is
# exact in e4m3, so that a row that sees one key returns its value unrounded.
TOP_LOG2: gl.constexpr = gl.constexpr(4.0)


@gluon.constexpr_function
def headroom(dtype):
    """How far above its row's maximum a reference is set, in log2. bfloat16 represents small p as
    exactly as large ones. A p that falls below 2^-126 is then below 2^-94 of the row's largest."""
    return 32.0 if dtype == gl.bfloat16 else 0.0


@gluon.constexpr_function
def sum_limit(dtype):
    """The limit of one lane's part of a row sum, as the bits of a float32. p must stay finite in
    `dtype`, and a sum of p v in float32."""
    return 0x4F800000 if dtype == gl.bfloat16 else 0x45800000  # 2^32, 2^12


@gluon.jit
def reference_of(s_MN, scale_log2, HEAD: gl.constexpr):
    """The reference of rows whose largest scores are these, by explicit steps: each place that
    computes it gives the same bits."""
    return gl.fma(gl.max(s_MN, 1), scale_log2, HEAD)


@gluon.jit
def rows_above(sums_ML, LIMIT_BITS: gl.constexpr, m_M):
    """Which rows have a sum above the limit, or NaN, in one of their lanes: as `vote_above`. m_M:
    their references, which lie as the result does."""
    layout: gl.constexpr = m_M.type.layout
    bits_M = gl.max(sums_ML.to(gl.int32, bitcast=True), 1)
    return gl.convert_layout(bits_M > LIMIT_BITS, layout)


@gluon.jit
def references_of_rows_above(s_MN, sums_ML, m_M, scale_log2, dtype: gl.constexpr):
    """The references of rows with these scores whose sums are above the limit. Those of other rows
    stay m_M: their factor is 1, which changes no bit."""
    over_M = rows_above(sums_ML, sum_limit(dtype), m_M)
    return gl.where(over_M, reference_of(s_MN, scale_log2, headroom(dtype)), m_M)


@gluon.jit
def rescale_from_scores(s_MN, top_M, m_M, l_ML, scale_log2, MAY_MASK_ROWS: gl.constexpr):
    """One more tile with references of at least `top_M`. Returns p, the references, the scaled
    sums, and the factor of these sums and of the output so far."""
    new_m_M = gl.maximum(m_M, top_M)
    shift_M = shift_of(new_m_M, MAY_MASK_ROWS)
    alpha_M = gl.exp2(m_M - shift_M)
    p_MN = exponentials(s_MN, shift_M, scale_log2)
    return p_MN, new_m_M, scale_rows(l_ML, alpha_M), alpha_M


@gluon.jit
def rescale_from_probabilities(p_MN, m_M, l_ML):
    """As `rescale_from_scores`, for fp8, from the p of the old reference, which must all
    be finite."""
    new_m_M = m_M + gl.maximum(gl.log2(gl.max(p_MN, 1)) - TOP_LOG2, 0.0)
    # The factor is the difference of the rounded references, which the exponentials use.
    alpha_M = gl.exp2(m_M - shift_of(new_m_M))
    return p_MN * alpha_M[:, None], new_m_M, scale_rows(l_ML, alpha_M), alpha_M


@gluon.constexpr_function
def _warp_scores(dim, keys, kind):
    """Assembly: each warp's 16 queries times all keys of a tile. The tile lies in slabs of rows of
    up to 128 bytes, whose 16-byte pieces TMA has swizzled by the row."""
    # ptxas: the addresses of tensors' fragments would be hoisted out of every loop and kept.
    row_bytes = dim if kind == "e4m3" else 2 * dim
    width = min(row_bytes, 128)
    shift, steps = width.bit_length() - 1, width // 32
    scores = [f"${i}" for i in range(keys // 2)]
    q, k = f"${keys // 2}", f"${keys // 2 + 1}"
    depth = 32 if kind == "e4m3" else 16
    mma = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    # The piece that comes first in a row: rows of 64 bytes change it every other row.
    swizzle = "and.b32 y, l, 7;" if width == 128 else "shr.u32 y, l, 1; and.b32 y, y, 3;"
    # ptxas: in fp8 a shift would spill 15 registers at D64; in 16 bits a division would spill 13.
    slab = f"div.u32 u, i, {steps};" if kind == "e4m3" else f"shr.u32 u, i, {shift - 5};"
    lines = [
        "{ .reg .b32 t, u, i, l, x, y, q, k, a<4>, b<4>; .reg .pred p;",
        f"mov.u32 t, %tid.x; and.b32 l, t, 31; {swizzle} and.b32 t, t, 96;",
        # Queries: lane l holds row l % 16 of its warp's rows, and piece l / 16 of it.
        f"and.b32 x, l, 15; shr.u32 t, t, 1; add.u32 t, t, x; shl.b32 t, t, {shift};",
        f"shr.u32 x, l, 4; xor.b32 x, x, y; shl.b32 x, x, 4; add.u32 t, t, x; add.u32 q, t, {q};",
        # Keys: row l % 8 of the lower or upper eight of 16 rows (l / 16), and piece l / 8 % 2.
        "shr.u32 x, l, 3; and.b32 x, x, 1; xor.b32 x, x, y; shl.b32 x, x, 4; and.b32 y, l, 7;",
        f"and.b32 l, l, 16; shr.u32 l, l, 1; add.u32 y, y, l; shl.b32 y, y, {shift};",
        f"add.u32 x, x, y; add.u32 k, x, {k};",
        *(f"mov.f32 {score}, 0f00000000;" for score in scores),
        # ptxas: if it were unrolled, it would load far ahead, which takes registers.
        'mov.u32 i, 0; .pragma "nounroll";',
        f"AGAIN: and.b32 t, i, {steps - 1}; shl.b32 t, t, 5; {slab}",
        f"xor.b32 x, q, t; xor.b32 y, k, t; mad.lo.u32 x, u, {64 * width}, x;",
        f"mad.lo.u32 y, u, {keys * width}, y;",
        f"{load} {{a0, a1, a2, a3}}, [x];",
    ]
    for n in range(0, keys, 16):
        lines.append(f"{load} {{b0, b1, b2, b3}}, [y+{n * width}];")
        for eight, pair in ((n, "b0, b1"), (n + 8, "b2, b3")):
            sums = ", ".join(scores[eight // 2 : eight // 2 + 4])
            lines.append(f"{mma} {{{sums}}}, {{a0, a1, a2, a3}}, {{{pair}}}, {{{sums}}};")
    lines.append(f"add.u32 i, i, 1; setp.lt.u32 p, i, {row_bytes // 32}; @p bra AGAIN;")
    return "\n".join(lines) + " }"


@gluon.constexpr_function
def _kind(dtype):
    return {"bf16": "bf16", "fp16": "f16", "fp8e4nv": "e4m3"}[dtype.name]


@gluon.jit
def rescore(q, k, q_state, k_state, BLOCK_N: gl.constexpr):
    """The scores of one tile, computed once more by each warp for itself."""
    # S = Q K^T
    layout: gl.constexpr = scores_layout(q.boxes.dtype, BLOCK_N)
    s_type: gl.constexpr = gl.distributed_type(gl.float32, [ROWS, BLOCK_N], layout)
    text: gl.constexpr = _warp_scores(q.dim, k.rows, _kind(q.boxes.dtype))
    tiles = [q.boxes.index(q_state.index), k.boxes.index(k_state.index)]
    return inline_asm(text, ("=&f", "r", "r"), tiles, s_type)
