"""From transposed raw scores to probabilities, and from gradients of probabilities to those of
scores.

The probabilities of a step wait for its dP as pairs of float16 in one register (sm90/pairs.py),
scaled as p_scale.py says. Probabilities that dropout drops have their sign set. M query rows, N
keys (64), J pairs of neighbouring queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.philox import kept_quads, origin_of
from heedful.kernels.hopper.backward.mask import hide_by_bits, hide_by_words, hide_queries
from heedful.kernels.hopper.backward.tile import query_tile
from heedful.kernels.hopper.sm90.mma import ROWS
from heedful.kernels.hopper.sm90.pairs import bfloat16_pairs, from_pairs, to_pairs
from heedful.kernels.hopper.sm90.score_mods import apply_softcap


@gluon.constexpr_function
def counters_layout(M):
    """The layout of a (N / 4, M) tile of Philox counters in four warps, four keys to a counter.
    Each warp has the counters of its 16 rows of an accumulator, so that the conversion stays within
    a warp."""
    registers = [[0, 1]] + [[0, 32 << bit] for bit in range((M // 64).bit_length())] + [[2, 0]]
    lanes = [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[4, 0], [8, 0]], [], [ROWS // 4, M])


@gluon.jit
def keep_tile(dropout, tile, head, row, col, p_NM):
    """Which probabilities of keys from `col` on and queries from `row` on are kept: the same bits
    as in hopper/forward/dropout.py."""
    N: gl.constexpr = p_NM.shape[0]
    M: gl.constexpr = p_NM.shape[1]
    counters: gl.constexpr = counters_layout(M)
    origin_b, origin_h, origin_m, origin_n = origin_of(dropout)
    quad_N = gl.arange(0, N // 4, layout=gl.SliceLayout(1, counters)) * 4 + (col + origin_n)
    row_M = gl.arange(0, M, layout=gl.SliceLayout(0, counters)) + (row + origin_m)
    zero_NM = gl.zeros([N // 4, M], gl.uint32, counters)
    head, batch = head + origin_h, tile.batch + origin_b
    k0, k1, k2, k3 = kept_quads(dropout, quad_N[:, None], row_M[None, :], head, batch, zero_NM)
    # join adds an innermost axis, so [.., x, y] holds word 2 * x + y.
    keep = gl.join(gl.join(k0, k2), gl.join(k1, k3)).permute((0, 2, 3, 1)).reshape([N, M])
    return gl.convert_layout(keep, p_NM.type.layout) != 0


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
    if params.dropout.IS_ON:
        keep_NM = keep_tile(params.dropout, tile, head, row, col, p_NM)
        p_NM = gl.where(keep_NM, p_NM, -p_NM)
    return (to_pairs(p_NM, gl.float16),) + slopes


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
