"""From raw products q k^T to visible scores; all portable and CDNA kernels compute them here.

The order is scale, softcap, ALiBi, biases, mask. Probabilities use exp2, which the hardware has as
one instruction. Scores without modifiers and with 16-bit inputs stay raw products, and the exponent
folds in scale * LOG2E. All other scores are in natural units: (score - maximum) is then exact
before it is scaled, and a lone key has a probability of exactly 1.

Shapes: M query rows, N key columns, D head dim.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from heedful.kernels.args.kinds import RowVector
from heedful.kernels.args.shared import Descale, Descales, Mask, ScoreMods
from heedful.kernels.common.block_lists import bits_visible
from heedful.kernels.common.constants import LN2, LOG2E, LOG2E_REST
from heedful.kernels.common.row_ranges import head_ranges, range_visible
from heedful.kernels.common.rows import wide


class HeadMods(NamedTuple):
    """The score modifiers of one head of one sequence: the scale with descales, the slope of ALiBi,
    and where its biases, its tree mask and its ranges begin. A modifier that is absent is 0. bits:
    the index of a tile that a block mask shows in part, else -1."""

    scale: Any
    slope: Any
    bias: Any
    relative: Any
    tree: Any
    ranges: Any
    bits: Any


@triton.jit
def exponential(x, IS_EXACT: tl.constexpr):
    """e^x for x <= 0. IS_EXACT, for float32 inputs: to about the digits of float32. x * LOG2E alone
    loses one digit for each doubling of x."""
    if IS_EXACT:
        # -inf - -inf would be NaN below. All numbers under the bound have an exponential of 0, as
        # -inf has.
        x = tl.maximum(x, -1000.0, propagate_nan=tl.PropagateNan.ALL)
        high = x * LOG2E
        low = tl.fma(x, LOG2E, -high)
        low = tl.fma(x, LOG2E_REST, low)
        rough = tl.exp2(high)
        return tl.fma(rough, low * LN2, rough)
    else:
        return tl.exp2(x * LOG2E)


@triton.jit
def plus_product(total, a, b, PRECISION: tl.constexpr, IS_EXACT: tl.constexpr):
    """total + a b. IS_EXACT, for float32 inputs: the product of a tile is summed by itself, since
    one chain of additions over a whole sequence loses digits."""
    if IS_EXACT:
        # For float32, this bound on imprecise additions has one effect: the compiler does not chain
        # the product to the total.
        return total + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def halves(x_RD):
    """The first and the second half of the columns."""
    R: tl.constexpr = x_RD.shape[0]
    D: tl.constexpr = x_RD.shape[1]
    return tl.split(tl.permute(tl.reshape(x_RD, [R, 2, D // 2]), [0, 2, 1]))


@triton.jit
def product_of_rows(a_RD, b_SD, PRECISION: tl.constexpr, IS_EXACT: tl.constexpr):
    """a b^T. IS_EXACT, for float32 inputs: rows wider than 64 are summed in two chains of
    additions. All portable kernels compute scores here. So the backward's scores have the bits of
    the forward's, and a lone key keeps a probability of exactly 1."""
    if IS_EXACT and a_RD.shape[1] > 64:
        a0, a1 = halves(a_RD)
        b0, b1 = halves(b_SD)
        first_RS = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
        return plus_product(first_RS, a1, tl.trans(b1), PRECISION, IS_EXACT)
    else:
        return tl.dot(a_RD, tl.trans(b_SD), input_precision=PRECISION)


@triton.jit
def tanh(x):
    """tanh to a few units in the last place, also near zero, where 1 - 2 / (exp + 1) cancels."""
    square = x * x
    # Minimax on |x| < 0.625 of (tanh(x) / x - 1) / x^2; the relative error of tanh is 4e-09.
    poly = -5.717036400e-03
    poly = poly * square + 2.065057885e-02
    poly = poly * square - 5.374349521e-02
    poly = poly * square + 1.333149125e-01
    poly = poly * square - 3.333328392e-01
    near = x + x * square * poly
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2E)) + 1.0)
    far = tl.where(x < 0, -far, far)
    return tl.where(size < 0.625, near, far)


@triton.jit
def head_mods(scale, b, h, params):
    """The score modifiers of query head h in sequence b. scale: of raw scores, with descales."""
    slope = 0.0
    bias = 0
    relative = 0
    tree = 0
    ranges = 0
    if params.mods.alibi is not None:
        slope = tl.load(params.mods.alibi + b * params.mods.stride_alibib + h)
    if params.mods.bias.ptr is not None:
        bias = params.mods.bias.ptr + (
            b * params.mods.bias.stride_b + h * params.mods.bias.stride_h
        )
    if params.mods.relative.ptr is not None:
        relative = params.mods.relative.ptr + h * params.mods.relative.stride_h
    if params.mask.tree.ptr is not None:
        tree = params.mask.tree.ptr + b * params.mask.tree.stride_b
    if params.mask.RANGES:
        ranges = head_ranges(b, h, params.mask)
    return HeadMods(scale, slope, bias, relative, tree, ranges, -1)


@triton.jit
def descaled(factor, descale: Descale, place):
    """The factor times the descale of a place's (batch, KV head), if there is one."""
    if descale.ptr is not None:
        factor *= tl.load(descale.ptr + place.b * descale.stride_b + place.g * descale.stride_h)
    return factor


@triton.jit
def with_descales(scale, factor, place, descales: Descales):
    """(scale of scores, factor of outputs) times the descales of a place's heads."""
    scale = descaled(scale, descales.q, place)
    if descales.KV_GROUP == 0:
        scale = descaled(scale, descales.k, place)
        factor = descaled(factor, descales.v, place)
    return scale, factor


@triton.jit
def with_bits(head, bits):
    """The modifiers of a head for a tile with this index of bits."""
    return HeadMods(head.scale, head.slope, head.bias, head.relative, head.tree, head.ranges, bits)


@triton.jit
def bias_tile(row0, col0, distance, place, head, params, TRANSPOSED: tl.constexpr):
    """The sum of a tile's biases in float32: [M, N] or, if TRANSPOSED, [N, M]; 0 if there is none.
    distance: as of `adjust_scores`. Rows and columns past the sequence repeat its last one: their
    scores are masked or never stored."""
    b_tile = 0.0
    if params.mods.relative.ptr is not None:
        last = params.mods.relative.last
        entry = tl.minimum(tl.maximum((last + 1) // 2 - distance, 0), last)
        b_tile = tl.load(head.relative + entry).to(tl.float32)
    if params.mods.bias.ptr is not None:
        rows = tl.minimum(tl.arange(0, params.tile.BLOCK_M), place.seq.len_q - 1 - row0)
        cols = tl.minimum(tl.arange(0, params.tile.BLOCK_N), place.seq.len_k - 1 - col0)
        stride_m, stride_n = params.mods.bias.stride_m, params.mods.bias.stride_n
        base = head.bias + wide(row0) * stride_m + wide(col0) * stride_n
        if TRANSPOSED:
            ptrs = base + cols[:, None] * stride_n + rows[None, :] * stride_m
        else:
            ptrs = base + rows[:, None] * stride_m + cols[None, :] * stride_n
        added = tl.load(ptrs).to(tl.float32)
        # 0 + x is an instruction for each score: -0 would become 0.
        b_tile = added if params.mods.relative.ptr is None else b_tile + added
    return b_tile


@triton.jit
def adjust_scores(s, distance, b_tile, head, mods: ScoreMods):
    """(scores in natural units, d score / d (s * scale)) of raw products. distance: the key's index
    minus the query's place on the diagonal.

    Each product that enters a sum is an explicit fused multiply-add. Where the compiler chooses,
    the scores of two kernels, or of two loops of one kernel, may differ by a rounding. Scores near
    1e9, whose neighbours are 64 away, would then differ by more than an exponential can stand.
    """
    slope_of_cap = 1.0
    factor = head.scale
    if mods.HAS_SOFTCAP:
        s = tanh(s * (head.scale / mods.softcap))
        slope_of_cap = 1.0 - s * s
        factor = mods.softcap
    if mods.alibi is not None:
        # ptxas: the product is a number of each distance, of which a tile has few; it is shared.
        s = tl.fma(s, factor, tl.abs(distance).to(tl.float32) * -head.slope)
        if mods.bias.ptr is not None or mods.relative.ptr is not None:
            s += b_tile
    elif mods.bias.ptr is not None or mods.relative.ptr is not None:
        s = tl.fma(s, factor, b_tile)
    else:
        s = tl.fma(s, factor, 0.0)
    return s, slope_of_cap


@triton.jit
def visible(rows, cols, distance, place, head, mask: Mask):
    """Which scores exist, are in the window, in the tree mask, in the rows' ranges and in the
    tile's bits. rows, cols and distance broadcast."""
    ok = in_window(cols, distance, place, mask)
    if mask.tree.ptr is not None:
        ok &= tree_visible(rows, cols, place, head, mask)
    if mask.RANGES:
        ok &= range_visible(head.ranges, rows, cols, place, mask)
    if mask.blocks.SIDE:
        ok &= bits_visible(head.bits, rows, cols, mask.blocks)
    return ok


@triton.jit
def in_window(cols, distance, place, mask: Mask):
    """Which scores exist and are in the window."""
    ok = (cols < place.seq.len_k) & (distance == distance)
    if mask.HAS_RIGHT:
        ok &= distance <= mask.right
    if mask.HAS_LEFT:
        ok &= (distance >= -mask.left) | (cols < mask.first)
    return ok


@triton.jit
def tree_visible(rows, cols, place, head, mask: Mask):
    """Which scores the tree mask shows. The mask covers the last len_q keys; all keys before are
    seen."""
    nodes = cols - (place.seq.len_k - place.seq.len_q)
    inside = (nodes >= 0) & (nodes < place.seq.len_q) & (rows < place.seq.len_q)
    places = head.tree + wide(rows) * mask.tree.stride_m + nodes
    return tl.load(places, mask=inside, other=1) != 0


@triton.jit
def modified_scores(
    s_MN,
    rows_M,
    row0,
    col0,
    place,
    head,
    params,
    IS_ADJUSTED: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Raw products, after score modifiers if IS_ADJUSTED; scores that are not visible become -inf
    if IS_MASKED."""
    cols_N = col0 + tl.arange(0, params.tile.BLOCK_N)
    distance_MN = cols_N[None, :] - (rows_M + place.seq.off)[:, None]
    if IS_ADJUSTED:
        bias_MN = bias_tile(row0, col0, distance_MN, place, head, params, False)
        s_MN, _slope = adjust_scores(s_MN, distance_MN, bias_MN, head, params.mods)
    if IS_MASKED:
        ok_MN = visible(rows_M[:, None], cols_N[None, :], distance_MN, place, head, params.mask)
        s_MN = tl.where(ok_MN, s_MN, float("-inf"))
    return s_MN


@triton.jit
def finite_or_zero(m):
    """The running maximum to subtract: 0 for a row that has seen no key, so that it never subtracts
    -inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def softmax_step(
    s_MN,
    m_M,
    l_M,
    scale,
    IS_ADJUSTED: tl.constexpr,
    IS_EXACT: tl.constexpr,
    IS_SAFE: tl.constexpr = True,
):
    """(probabilities, new maximum, new sum, factor for earlier sums) after one more tile.

    IS_ADJUSTED: scores and maximum are in natural units; else scores are raw, the maximum is in
    base 2, and the scale is folded into the exponent. IS_SAFE: a row may have seen no key yet.
    """
    top_M = tl.max(s_MN, 1)
    if not IS_ADJUSTED:
        top_M = top_M * (scale * LOG2E)
    new_M = tl.maximum(m_M, top_M)
    base_M = new_M
    if IS_SAFE:
        base_M = finite_or_zero(new_M)
    if IS_ADJUSTED:
        p_MN = exponential(s_MN - base_M[:, None], IS_EXACT)
        alpha_M = exponential(m_M - base_M, IS_EXACT)
    else:
        p_MN = tl.exp2(tl.fma(s_MN, scale * LOG2E, -base_M[:, None]))
        alpha_M = tl.exp2(m_M - base_M)
    return p_MN, new_M, l_M * alpha_M + tl.sum(p_MN, 1), alpha_M


@triton.jit
def sink_state(logit, m_M, IS_ADJUSTED: tl.constexpr):
    """(maximum, sum) of rows that have seen nothing but the sink, in natural units or in base 2. In
    base 2 the maximum is rounded, so the sum is not exactly 1. m_M: a tensor of their shape."""
    m_M = tl.zeros_like(m_M) + logit
    l_M = tl.full(m_M.shape, 1.0, tl.float32)
    if not IS_ADJUSTED:
        top_M = finite_or_zero(m_M * LOG2E)
        l_M = tl.exp2(tl.fma(m_M, LOG2E, -top_M))
        m_M *= LOG2E
    return m_M, tl.where(m_M == float("-inf"), 0.0, l_M)


@triton.jit
def first_statistics(split, place, params, IS_ADJUSTED: tl.constexpr):
    """(maximum, sum) of rows before any key: those of the sink in the first split, if there is one,
    else -inf and 0."""
    m_M = tl.full([params.tile.BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([params.tile.BLOCK_M], tl.float32)
    if params.mods.sink is not None:
        logit = tl.where(split == 0, tl.load(params.mods.sink + place.h), float("-inf"))
        m_M, l_M = sink_state(logit, m_M, IS_ADJUSTED)
    return m_M, l_M


@triton.jit
def lse_to_subtract(lse: RowVector, offsets, exists, IS_ADJUSTED: tl.constexpr):
    """The LSE in the units of the scores: natural ones if IS_ADJUSTED, else base 2. Rows that saw
    nothing and rows that do not exist get +inf, so that their probabilities are 0."""
    lse_M = tl.load(lse.ptr + offsets, mask=exists, other=float("inf"))
    lse_M = tl.where(lse_M == float("-inf"), float("inf"), lse_M)
    if not IS_ADJUSTED:
        lse_M *= LOG2E
    return lse_M


@triton.jit
def probabilities(
    q_MD,
    k_ND,
    lse_M,
    row0,
    col0,
    place,
    head,
    params,
    IS_MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """(probabilities, d score / d (s * scale)) of a tile whose LSE is known: [M, N] or, if
    TRANSPOSED, [N, M]. lse_M: the number to subtract from scores, in their units
    (`lse_to_subtract`)."""
    IS_EXACT: tl.constexpr = q_MD.dtype == tl.float32
    PRECISION: tl.constexpr = params.tile.PRECISION
    in_rows_M = tl.arange(0, params.tile.BLOCK_M)
    in_cols_N = tl.arange(0, params.tile.BLOCK_N)
    rows_M, cols_N = row0 + in_rows_M, col0 + in_cols_N
    if TRANSPOSED:
        s = product_of_rows(k_ND, q_MD, PRECISION, IS_EXACT)
        rows, cols, lse = rows_M[None, :], cols_N[:, None], lse_M[None, :]
    else:
        s = product_of_rows(q_MD, k_ND, PRECISION, IS_EXACT)
        rows, cols, lse = rows_M[:, None], cols_N[None, :], lse_M[:, None]
    # ptxas: terms in another order take fewer registers, but more where a slope multiplies them.
    distance = cols - (rows + place.seq.off)
    if params.mods.alibi is None:
        if TRANSPOSED:
            distance = in_cols_N[:, None] - in_rows_M[None, :] + (col0 - row0 - place.seq.off)
        else:
            distance = in_cols_N[None, :] - in_rows_M[:, None] + (col0 - row0 - place.seq.off)
    slope_of_cap = 1.0
    if params.mods.IS_ADJUSTED:
        b_tile = bias_tile(row0, col0, distance, place, head, params, TRANSPOSED)
        s, slope_of_cap = adjust_scores(s, distance, b_tile, head, params.mods)
        p = exponential(s - lse, IS_EXACT)
    else:
        # ptxas: Triton 3.6 makes 0 - lse of -lse, which is an instruction of its own.
        p = tl.exp2(tl.fma(s, head.scale * LOG2E, lse * -1.0))
    if IS_MASKED:
        p = tl.where(visible(rows, cols, distance, place, head, params.mask), p, 0.0)
    return p, slope_of_cap
