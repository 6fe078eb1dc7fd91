"""From transposed raw scores to probabilities, and from gradients of probabilities to those of
scores.

The probabilities of a step wait for its dP as pairs of float16 in one register (sm90/pairs.py),
scaled as p_scale.py says. Probabilities that dropout drops have their sign set. The four words of a
Philox counter are those of four neighbouring keys, which four lanes of a warp have. Each of these
lanes computes a quarter of their counters, and they pass the outcomes on as bytes, in registers. M
query rows, N keys (64), J pairs of neighbouring queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.philox import place_of, quad_words
from heedful.kernels.hopper.backward.mask import hide_by_bits, hide_by_words, hide_queries
from heedful.kernels.hopper.backward.tile import query_tile
from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pairs import bfloat16_pairs, from_pairs, to_pairs
from heedful.kernels.hopper.sm90.score_mods import apply_softcap


@gluon.constexpr_function
def counters_layout(M, warps):
    """The layout of a (N / 4, M) tile of counters. Each warp has those of its 16 rows of an
    accumulator. Eight counters of a thread, the first three bits of its registers, are those of
    eight pairs in one half of them. With eight warps, both warpgroups have all of it, as
    `scores_layout` says."""
    registers = [[2, 0], [0, 8], [0, 16]] + [[0, 64]] * (M // 128)
    lanes = [[0, 2], [0, 4], [0, 32], [0, 1], [1, 0]]
    groups = [[4, 0], [8, 0], [0, 0]][: warps.bit_length() - 1]
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [ROWS // 4, M])


@gluon.constexpr_function
def _signs(M):
    """Assembly: flips the signs of the pairs of a thread's two keys whose words are not below the
    threshold, the last operand. Operands: pairs as outputs and inputs, then four tensors of
    words."""
    pairs, counters = M // 4, M // 8
    words = 2 * pairs
    threshold = words + 4 * counters
    lines = [
        "{ .reg .pred p, q; .reg .b32 t, u, first, second, x, y, b<4>; mov.u32 t, %laneid;",
        "and.b32 u, t, 8; setp.eq.u32 p, u, 0; selp.b32 first, 0x5410, 0x3276, p;",
        "and.b32 u, t, 4; setp.eq.u32 p, u, 0; selp.b32 second, 0x6240, 0x3715, p;",
    ]
    for half in range(0, counters, 8):
        # A byte for each of the four lanes: which of eight scores this lane drops for it.
        for lane in range(4):
            lines.append(f"mov.b32 b{lane}, 0;")
            for i in range(8):
                word = words + lane * counters + half + i
                lines.append(f"setp.ge.u32 q, ${word}, ${threshold};")
                lines.append(f"@q or.b32 b{lane}, b{lane}, {1 << i + 8 * lane};")
        lines.append("or.b32 x, b0, b1; or.b32 y, b2, b3; or.b32 x, x, y;")
        # Four lanes transpose their bytes: first with the lane eight apart, then with four apart.
        lines.append("shfl.sync.bfly.b32 y, x, 8, 31, -1; prmt.b32 x, x, y, first;")
        lines.append("shfl.sync.bfly.b32 y, x, 4, 31, -1; prmt.b32 x, x, y, second;")
        # Bit i is now that of the lower query of pair i, bit 16 + i that of the upper one.
        for i in range(16):
            pair = 2 * half + i
            lines.append(f"shl.b32 t, x, {15 - i};")
            lines.append(f"lop3.b32 ${pair}, ${pair}, t, 0x80008000, 0x78;")
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _operands(M):
    """Constraints: pairs stay in their registers."""
    pairs = M // 4
    return ",".join(["=r"] * pairs + [str(i) for i in range(pairs)] + ["r"] * (M // 2 + 1))


@gluon.jit
def signed_pairs(p_NJ, dropout, tile, head, row, col):
    """Pairs of probabilities of keys from `col` on and queries from `row` on, with the signs of
    those that are dropped set: the same bits as in hopper/forward/dropout.py."""
    N: gl.constexpr = p_NJ.shape[0]
    M: gl.constexpr = p_NJ.shape[1] * 2
    counters: gl.constexpr = counters_layout(M, gl.num_warps())
    batch, head, origin_m, origin_n = place_of(dropout, tile.batch, head)
    quad_N = gl.arange(0, N // 4, layout=gl.SliceLayout(1, counters)) * 4 + (col + origin_n)
    row_M = gl.arange(0, M, layout=gl.SliceLayout(0, counters)) + (row + origin_m)
    zero_NM = gl.zeros([N // 4, M], gl.uint32, counters)
    w0, w1, w2, w3 = quad_words(dropout, quad_N[:, None], row_M[None, :], head, batch, zero_NM)
    threshold = dropout.threshold.to(gl.uint32)
    text: gl.constexpr = _signs(M)
    operands: gl.constexpr = _operands(M)
    # The shuffles make all lanes of a warp meet, so this stays where it is.
    return inline_asm(text, operands, [p_NJ, w0, w1, w2, w3, threshold], p_NJ.type)


@gluon.jit
def queued_probabilities(
    s_NM,
    rows,
    blocks,
    params,
    tile,
    number,
    dtype: gl.constexpr,
    CONSUMER,
    MASKED: gl.constexpr,
):
    """The inputs of a visit's dV and dS: probabilities in pairs and, with softcap, the slopes of
    the cap. rows: of `row_numbers`."""
    col = tile.col + CONSUMER * ROWS
    slopes = ()
    if params.mods.HAS_SOFTCAP:
        s_NM = apply_softcap(s_NM, params.mods.softcap_scale)
        slopes = (to_pairs(1.0 - s_NM * s_NM, dtype),)
    BY_WORDS: gl.constexpr = params.mask.RANGES or params.mask.blocks.SIDE
    if (MASKED and not BY_WORDS) or params.dropout.IS_ON:
        head, block = query_tile(params, tile, blocks, number)
        row = block * params.tile.BLOCK_M
    p_NM = gl.exp2(s_NM * params.mods.scale_log2 - rows[0][None, :])
    if MASKED:
        if params.mask.blocks.SIDE:
            p_NM = hide_by_bits(p_NM, rows[1])
        elif params.mask.RANGES:
            p_NM = hide_by_words(p_NM, rows[1], params, CONSUMER)
        else:
            p_NM = hide_queries(p_NM, params, tile, row, CONSUMER)
    p_NJ = to_pairs(p_NM, gl.float16)
    if params.dropout.IS_ON:
        p_NJ = signed_pairs(p_NJ, params.dropout, tile, head, row, col)
    return (p_NJ,) + slopes


@gluon.jit
def kept_probabilities(queued, params, dtype: gl.constexpr, layout: gl.constexpr):
    """The left operand of dV: probabilities, with 0 for the dropped ones."""
    p_NJ = queued[0]
    if params.dropout.IS_ON:
        text: gl.constexpr = "{ .reg .b32 z; mov.b32 z, 0; max.f16x2 $0, $1, z; }"
        p_NJ = gl.inline_asm_elementwise(text, "=r,r", [p_NJ], gl.int32, True, 1)
    if dtype == gl.bfloat16:
        p_NJ = bfloat16_pairs(p_NJ)
    return from_pairs(p_NJ, dtype, layout)


@gluon.jit
def score_gradients(queued, dp_NM, delta_M, params, dtype: gl.constexpr):
    """dS of raw scores, without the scale, in float32."""
    layout: gl.constexpr = dp_NM.type.layout
    p_NM = from_pairs(queued[0], gl.float16, layout).to(gl.float32)
    if params.dropout.IS_ON:
        dp_NM = gl.where(p_NM > 0.0, dp_NM * params.dropout.inverse_keep, 0.0)
        p_NM = gl.abs(p_NM)
    ds_NM = p_NM * (dp_NM - delta_M[None, :])
    if params.mods.HAS_SOFTCAP:
        ds_NM *= from_pairs(queued[1], dtype, layout).to(gl.float32)
    return ds_NM
