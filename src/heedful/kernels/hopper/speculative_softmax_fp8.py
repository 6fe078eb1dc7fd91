"""Speculative softmax in fp8: exponentials first, then a vote whether e4m3 could hold them.

A p over 448 saturates in silence. Sums of p over 16 keys of one lane, which the softmax needs
anyway, bound it: none is above 448 while no sum is. References are set where a row's maximum has
p = 16, so that 16 equal scores make no false overflow, and a true one moves the reference.

M query rows, N keys, L lanes that share a row, C sums of a lane's row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import inline_asm
from heedful.kernels.hopper.softmax import _vote_above, scale_rows
from heedful.kernels.hopper.softmax_fp8 import TOP_LOG2, part_sums, reference, shift_of

# As the bits of float32: the largest e4m3, and what p may be for its row to be scaled.
E4M3_BITS: gl.constexpr = gl.constexpr(0x43E00000)  # 448
FINITE_BITS: gl.constexpr = gl.constexpr(0x7B800000)  # 2^120


@gluon.jit
def exponentials(s_MN, m_M, scale_log2):
    """p of one tile against an old reference, and its sums over each 64 keys, (M, C, L): infinite
    or NaN in a row that has no reference yet."""
    p_MN = gl.exp2(s_MN * scale_log2 - m_M[:, None])
    return p_MN, part_sums(p_MN)


@gluon.jit
def overflow_vote(sums_MCL, LIMIT_BITS: gl.constexpr):
    """Whether a warp has a sum above the limit, or NaN."""
    bits_MCL = sums_MCL.to(gl.int32, bitcast=True)
    kinds: gl.constexpr = ("=r", "r", "r")
    return inline_asm(_vote_above, kinds, [bits_MCL, LIMIT_BITS], gl.int32, is_pure=True)


@gluon.jit
def rescale_from_scores(s_MN, m_M, l_ML, scale_log2):
    """One more tile with a new reference: p, its sums, the reference, the sums before, and what
    these and the output so far were scaled by."""
    new_m_M = gl.maximum(m_M, reference(s_MN, scale_log2))
    shift_M = shift_of(new_m_M)
    alpha_M = gl.exp2(m_M - shift_M)
    p_MN = gl.exp2(s_MN * scale_log2 - shift_M[:, None])
    return p_MN, gl.sum(part_sums(p_MN), 1), new_m_M, scale_rows(l_ML, alpha_M), alpha_M


@gluon.jit
def rescale_from_probabilities(p_MN, m_M, l_ML):
    """As `rescale_from_scores`, from the p of the old reference, all of which are finite."""
    risen_M = gl.maximum(gl.log2(gl.max(p_MN, 1)) - TOP_LOG2, 0.0)
    alpha_M = gl.exp2(-risen_M)
    p_MN = p_MN * alpha_M[:, None]
    return p_MN, gl.sum(part_sums(p_MN), 1), m_M + risen_M, scale_rows(l_ML, alpha_M), alpha_M


@gluon.constexpr_function
def _warp_scores(dim, keys):
    """Assembly: each warp's 16 queries times all keys of a tile. Both lie in slabs of up to 128
    columns, whose 16-byte pieces TMA has swizzled by the row: see speculative_softmax.py."""
    width = min(dim, 128)
    steps = width // 32
    scores = [f"${i}" for i in range(keys // 2)]
    q, k = f"${keys // 2}", f"${keys // 2 + 1}"
    mma = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    # Which piece of a row comes first: rows of 64 bytes change it every other row.
    swizzle = "and.b32 y, l, 7;" if width == 128 else "shr.u32 y, l, 1; and.b32 y, y, 3;"
    lines = [
        "{ .reg .b32 t, u, i, l, x, y, q, k, a<4>, b<4>; .reg .pred p;",
        f"mov.u32 t, %tid.x; and.b32 l, t, 31; {swizzle} and.b32 t, t, 96;",
        # Queries: lane l holds row l % 16 of its warp's, and piece l / 16 of it.
        f"and.b32 x, l, 15; shr.u32 t, t, 1; add.u32 t, t, x; mul.lo.u32 t, t, {width};",
        f"shr.u32 x, l, 4; xor.b32 x, x, y; shl.b32 x, x, 4; add.u32 t, t, x; add.u32 q, t, {q};",
        # Keys: row l % 8 of the lower or upper eight of 16 (l / 16), and piece l / 8 % 2.
        "shr.u32 x, l, 3; and.b32 x, x, 1; xor.b32 x, x, y; shl.b32 x, x, 4; and.b32 y, l, 7;",
        f"and.b32 l, l, 16; shr.u32 l, l, 1; add.u32 y, y, l; mul.lo.u32 y, y, {width};",
        f"add.u32 x, x, y; add.u32 k, x, {k};",
        *(f"mov.f32 {score}, 0f00000000;" for score in scores),
        # A loop, since unrolled ptxas loads far ahead, which takes registers.
        'mov.u32 i, 0; .pragma "nounroll";',
        f"AGAIN: and.b32 t, i, {steps - 1}; shl.b32 t, t, 5; div.u32 u, i, {steps};",
        f"xor.b32 x, q, t; xor.b32 y, k, t; mad.lo.u32 x, u, {64 * width}, x;",
        f"mad.lo.u32 y, u, {keys * width}, y;",
        f"{load} {{a0, a1, a2, a3}}, [x];",
    ]
    for n in range(0, keys, 16):
        lines.append(f"{load} {{b0, b1, b2, b3}}, [y+{n * width}];")
        for eight, pair in ((n, "b0, b1"), (n + 8, "b2, b3")):
            sums = ", ".join(scores[eight // 2 : eight // 2 + 4])
            lines.append(f"{mma} {{{sums}}}, {{a0, a1, a2, a3}}, {{{pair}}}, {{{sums}}};")
    lines.append(f"add.u32 i, i, 1; setp.lt.u32 p, i, {dim // 32}; @p bra AGAIN;")
    return "\n".join(lines) + " }"


@gluon.jit
def rescore(q, k, q_state, k_state, s_type: gl.constexpr):
    """The scores of one tile once more, by every warp for itself."""
    text: gl.constexpr = _warp_scores(q.dim, k.rows)
    tiles = [q.boxes.index(q_state.index), k.boxes.index(k_state.index)]
    return inline_asm(text, ("=&f", "r", "r"), tiles, s_type)
