"""Speculative softmax: exponentials first, and only then a vote whether they were safe.

Scores are scored against a row's old reference m as p = 2^(s - m), without the new maximum:
the sums of p, which the softmax needs anyway, show whether any p is too large. A warp that finds
one (or a row without a reference) computes its scores once more, from the tile that is still in
shared memory, and moves its references. With room above the maximum that happens next to never, and
saves what costs most beside the exponentials: half an instruction an element, and the wait for it.

M query rows, N keys, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import inline_asm
from heedful.kernels.hopper.softmax import _vote_above, lane_sums, scale_rows


@gluon.constexpr_function
def headroom(dtype):
    """How far above its row's maximum a reference is set, in log2: bfloat16 keeps small p as exact
    as large ones, and what then falls under 2^-126 is under 2^-94 of the row's largest."""
    return 32.0 if dtype == gl.bfloat16 else 0.0


@gluon.constexpr_function
def sum_limit(dtype):
    """What one lane's part of a row sum may be, as the bits of a float32: p must stay finite in
    `dtype`, and a sum of p v in float32."""
    return 0x4F800000 if dtype == gl.bfloat16 else 0x45800000  # 2^32, 2^12


@gluon.jit
def exponentials(s_MN, m_M, scale_log2):
    """p of one tile against an old reference, and its row sums: infinite where p overflows,
    infinite or NaN in a row that has no reference yet."""
    p_MN = gl.exp2(s_MN * scale_log2 - m_M[:, None])
    return p_MN, lane_sums(p_MN)


@gluon.jit
def overflow_vote(sums_ML, LIMIT: gl.constexpr):
    """Whether a warp has a sum above the limit, or NaN."""
    bits_ML = sums_ML.to(gl.int32, bitcast=True)
    return inline_asm(_vote_above, ("=r", "r", "r"), [bits_ML, LIMIT], gl.int32, is_pure=True)


@gluon.jit
def rescale_from_scores(
    s_MN, m_M, l_ML, scale_log2, MAY_MASK_ROWS: gl.constexpr, HEAD: gl.constexpr
):
    """One more tile with a new reference: p, its sums, the reference, the sums before, and what
    these and the output so far were scaled by."""
    new_m_M = gl.maximum(m_M, gl.max(s_MN, 1) * scale_log2 + HEAD)
    shift_M = new_m_M
    if MAY_MASK_ROWS:
        shift_M = gl.where(new_m_M == float("-inf"), 0.0, new_m_M)
    alpha_M = gl.exp2(m_M - shift_M)
    p_MN = gl.exp2(s_MN * scale_log2 - shift_M[:, None])
    return p_MN, lane_sums(p_MN), new_m_M, scale_rows(l_ML, alpha_M), alpha_M


@gluon.constexpr_function
def _warp_scores(dim, keys, kind):
    """Assembly: each warp's 16 queries times all keys of a tile, in 64-column slabs of 128-byte
    rows, whose 16-byte pieces TMA has swizzled by the row. As tensors the fragments' addresses
    would be hoisted out of every loop and take registers there."""
    scores = [f"${i}" for i in range(keys // 2)]
    q, k = f"${keys // 2}", f"${keys // 2 + 1}"
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    lines = [
        "{ .reg .b32 t, u, i, l, x, y, q, k, a<4>, b<4>; .reg .pred p;",
        "mov.u32 t, %tid.x; and.b32 l, t, 31; and.b32 y, l, 7; and.b32 t, t, 96;",
        # Queries: lane l holds row l % 16 of its warp's, and piece l / 16 of it.
        "and.b32 x, l, 15; shr.u32 t, t, 1; add.u32 t, t, x; shl.b32 t, t, 7;",
        f"shr.u32 x, l, 4; xor.b32 x, x, y; shl.b32 x, x, 4; add.u32 t, t, x; add.u32 q, t, {q};",
        # Keys: row l % 8 of the lower or upper eight of 16 (l / 16), and piece l / 8 % 2.
        "shr.u32 x, l, 3; and.b32 x, x, 1; xor.b32 x, x, y; shl.b32 x, x, 4;",
        "and.b32 l, l, 16; shr.u32 l, l, 1; add.u32 y, y, l; shl.b32 y, y, 7; add.u32 x, x, y;",
        f"add.u32 k, x, {k};",
        *(f"mov.f32 {score}, 0f00000000;" for score in scores),
        # A loop, since unrolled ptxas loads far ahead, which takes registers.
        'mov.u32 i, 0; .pragma "nounroll";',
        "AGAIN: and.b32 t, i, 3; shl.b32 t, t, 5; shr.u32 u, i, 2; xor.b32 x, q, t;",
        f"xor.b32 y, k, t; mad.lo.u32 x, u, {64 * 128}, x; mad.lo.u32 y, u, {keys * 128}, y;",
        f"{load} {{a0, a1, a2, a3}}, [x];",
    ]
    for n in range(0, keys, 16):
        lines.append(f"{load} {{b0, b1, b2, b3}}, [y+{n * 128}];")
        for eight, pair in ((n, "b0, b1"), (n + 8, "b2, b3")):
            sums = ", ".join(scores[eight // 2 : eight // 2 + 4])
            lines.append(f"{mma} {{{sums}}}, {{a0, a1, a2, a3}}, {{{pair}}}, {{{sums}}};")
    lines.append(f"add.u32 i, i, 1; setp.lt.u32 p, i, {dim // 16}; @p bra AGAIN;")
    return "\n".join(lines) + " }"


@gluon.jit
def rescore(q, k, q_state, k_state, s_type: gl.constexpr):
    """The scores of one tile once more, by every warp for itself."""
    kind: gl.constexpr = "bf16" if q.boxes.dtype == gl.bfloat16 else "f16"
    text: gl.constexpr = _warp_scores(q.dim, k.rows, kind)
    tiles = [q.boxes.index(q_state.index), k.boxes.index(k_state.index)]
    return inline_asm(text, ("=&f", "r", "r"), tiles, s_type)
