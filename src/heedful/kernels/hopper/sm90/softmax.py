"""Online softmax of one warpgroup's rows. The sum of a row stays spread over four lanes.

Without a bias, scores are raw products, and m, the running maximum of a row, is in base 2. With a
bias (IS_NATURAL) both are in natural units. A running maximum that may lag behind the true one, or
stand above it, is called a reference.

M query rows, N keys, L lanes that share a row.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.common.constants import LOG2E
from heedful.kernels.hopper.sm90.compat import inline_asm


@gluon.jit
def lane_sums(p_MN):
    """Sums over the keys that one lane holds: (M, N) -> (M, 4).

    In a WGMMA accumulator a row lies in four lanes, each with two neighbouring keys of every eight.
    The four are added after the last tile, so that the loop needs no shuffles.
    """
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    return gl.sum(gl.sum(p_MN.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def lane_peaks(s_MN):
    """The largest score among the keys that one lane holds: (M, N) -> (M, 4), as `lane_sums`."""
    M: gl.constexpr = s_MN.shape[0]
    N: gl.constexpr = s_MN.shape[1]
    return gl.max(gl.max(s_MN.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(x_ME, alpha_M):
    """Multiplies row m by alpha_M[m]."""
    return x_ME * gl.convert_layout(alpha_M, gl.SliceLayout(1, x_ME.type.layout))[:, None]


@gluon.jit
def shift_of(m_M, MAY_MASK_ROWS: gl.constexpr = True):
    """The number to subtract for a reference. A row that may have seen no key has a reference of
    -inf, and -inf - -inf is NaN; it subtracts 0."""
    if MAY_MASK_ROWS:
        m_M = gl.where(m_M == float("-inf"), 0.0, m_M)
    return m_M


@gluon.jit
def powers(x, IS_NATURAL: gl.constexpr):
    """2^x; or e^x if x is in natural units."""
    if IS_NATURAL:
        x = x * LOG2E
    return gl.exp2(x)


@gluon.jit
def exponentials(s_MN, shift_M, scale_log2, IS_NATURAL: gl.constexpr = False):
    """p against a reference. It is infinite where it overflows, and infinite or NaN in rows without
    a reference.

    Raw scores are scaled and compared with a reference in base 2 in one instruction. The rounding
    of the reference is then in all p of its row alike. Scores in natural units are subtracted
    before anything is scaled; near the reference this is exact.
    """
    if IS_NATURAL:
        return powers(s_MN - shift_M[:, None], IS_NATURAL)
    else:
        return gl.exp2(s_MN * scale_log2 - shift_M[:, None])


@gluon.jit
def peaks(s_MN, scale_log2, IS_NATURAL: gl.constexpr = False, IS_SIGNED: gl.constexpr = False):
    """The largest score of each row, in the unit of references. IS_SIGNED: the scale may be
    negative, as descales may be."""
    if IS_NATURAL:
        return gl.max(s_MN, 1)
    else:
        if IS_SIGNED and scale_log2 < 0.0:
            peak_M = gl.min(s_MN, 1)
        else:
            peak_M = gl.max(s_MN, 1)
        return peak_M * scale_log2


@gluon.jit
def softmax_exact(
    s_MN, m_M, l_ML, scale_log2, MAY_MASK_ROWS: gl.constexpr, IS_NATURAL: gl.constexpr = False
):
    """(p, new maximum, new sums, factor for the output so far) after one more tile."""
    new_m_M = gl.maximum(m_M, peaks(s_MN, scale_log2, IS_NATURAL))
    shift_M = shift_of(new_m_M, MAY_MASK_ROWS)
    alpha_M = powers(m_M - shift_M, IS_NATURAL)
    p_MN = exponentials(s_MN, shift_M, scale_log2, IS_NATURAL)
    return p_MN, new_m_M, scale_rows(l_ML, alpha_M) + lane_sums(p_MN), alpha_M


@gluon.constexpr_function
def threshold_limit(dtype):
    """How far a score may be above its row's reference, in log2. p must stay finite in `dtype`, and
    a sum of p v in float32."""
    return 32.0 if dtype == gl.bfloat16 else 12.0


@gluon.constexpr_function
def float_bits(value):
    """The bits of a positive float32."""
    mantissa, exponent = math.frexp(value)
    return ((exponent + 125) << 23) + round(mantissa * 2**24)


@gluon.constexpr_function
def _vote_above(outputs, inputs):
    """Assembly: does any lane of the warp hold a value above the limit? Values are compared as
    integers: non-negative floats keep their order, negative ones are below all of them, and sm_90
    takes the maximum of three integers in one instruction."""
    flag = outputs[0][0]
    limit = inputs[-1][0]
    values = [value for group in inputs[:-1] for value in group]
    chains = min(4, len(values))
    lines = [f"mov.b32 m{c}, {values[c]};" for c in range(chains)]
    lines += [f"max.s32 m{i % chains}, m{i % chains}, {v};" for i, v in enumerate(values[chains:])]
    lines += [f"max.s32 m0, m0, m{c};" for c in range(1, chains)]
    registers = ", ".join(f"m{c}" for c in range(chains))
    return (
        f"{{ .reg .b32 {registers}; .reg .pred p; "
        + " ".join(lines)
        + f" setp.gt.s32 p, m0, {limit}; vote.sync.any.pred p, p, 0xffffffff;"
        f" selp.b32 {flag}, 1, 0, p; }}"
    )


@gluon.jit
def vote_above(values, LIMIT_BITS: gl.constexpr):
    """Whether any value of the warp is above the limit, or NaN."""
    bits = values.to(gl.int32, bitcast=True)
    kinds: gl.constexpr = ("=r", "r", "r")
    return inline_asm(_vote_above, kinds, [bits, LIMIT_BITS], gl.int32, is_pure=True)


@gluon.constexpr_function
def _vote_at_bounds(outputs, inputs):
    """Assembly: does any lane of the warp hold a score at or above its row's bound, or a row whose
    bound is negative? In a lane's scores, two neighbours belong to one row, the next two to the
    other, and so on; of two, each is a row's largest."""
    flag = outputs[0][0]
    scores, bounds = inputs
    lines = []
    for row in range(2):
        if len(scores) == 2:
            lines.append(f"mov.b32 m{row}, {scores[row]};")
            continue
        values = [score for i, score in enumerate(scores) if i // 2 % 2 == row]
        chains = [f"m{row}", f"n{row}"]
        lines += [f"mov.b32 {c}, {v};" for c, v in zip(chains, values, strict=False)]
        for i, value in enumerate(values[2:]):
            lines.append(f"max.s32 {chains[i % 2]}, {chains[i % 2]}, {value};")
        lines.append(f"max.s32 m{row}, m{row}, n{row};")
    return (
        "{ .reg .b32 m<2>, n<2>; .reg .pred p; "
        + " ".join(lines)
        + f" setp.lt.s32 p, {bounds[0]}, 0; setp.lt.or.s32 p, {bounds[1]}, 0, p;"
        f" setp.ge.or.s32 p, m0, {bounds[0]}, p; setp.ge.or.s32 p, m1, {bounds[1]}, p;"
        f" vote.sync.any.pred p, p, 0xffffffff; selp.b32 {flag}, 1, 0, p; }}"
    )


@gluon.jit
def vote_at_bounds(s_MN, bound_M):
    """Whether any score of the warp is at or above its row's bound or is NaN, or any bound is
    negative. s_MN: scores, or their `lane_peaks`. Negative bounds count, since negative floats have
    no order as integers."""
    bits = [s_MN.to(gl.int32, bitcast=True), bound_M.to(gl.int32, bitcast=True)]
    kinds: gl.constexpr = ("=r", "r", "r")
    return inline_asm(_vote_at_bounds, kinds, bits, gl.int32, is_pure=True)


@gluon.constexpr_function
def _raised(outputs, inputs):
    """Assembly: of two rows the largest of what a lane holds and of a number, as integers. Values
    lie as in `_vote_at_bounds`."""
    values, before = inputs
    lines = ["{ .reg .b32 m<2>, n<2>;"]
    lines += [
        f"mov.b32 m{row}, {before[row]}; mov.b32 n{row}, {values[2 * row]};" for row in (0, 1)
    ]
    # ptxas: of two in a row it makes a maximum of three.
    rest = [(i // 2 % 2, value) for i, value in enumerate(values) if i not in (0, 2)]
    for row in range(2):
        mine = [value for of, value in rest if of == row]
        pairs = [mine[i : i + 2] for i in range(0, len(mine), 2)]
        for place, pair in enumerate(pairs):
            chain = f"{'mn'[place % 2]}{row}"
            lines += [f"max.s32 {chain}, {chain}, {value};" for value in pair]
    lines += [f"max.s32 {outputs[0][row]}, m{row}, n{row};" for row in (0, 1)]
    return " ".join(lines) + " }"


@gluon.jit
def raised(p_MN, tops_ML):
    """The largest probability that a lane holds of each row, at least `tops_ML`: (M, 4), as
    `lane_sums`. None is negative, so that integers have their order."""
    bits = [p_MN.to(gl.int32, bitcast=True), tops_ML.to(gl.int32, bitcast=True)]
    kinds: gl.constexpr = ("=&r", "r", "r")
    found_ML = inline_asm(_raised, kinds, bits, bits[1].type, is_pure=True)
    return found_ML.to(gl.float32, bitcast=True)


@gluon.jit
def bounds_of(m_M, scale_log2, LIMIT: gl.constexpr, IS_NATURAL: gl.constexpr, IS_SIGNED):
    """Scores, in their own unit, that exceed their row's reference by about LIMIT, or a little
    less."""
    if IS_NATURAL:
        return m_M + LIMIT
    else:
        # The bound is a little lower, so that no rounding puts a score above the limit below its
        # bound.
        text: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
        per_unit = inline_asm(text, "=f,f", [gl.to_tensor(scale_log2)], gl.float32, is_pure=True)
        bound_M = (m_M + LIMIT) * (per_unit * 0.999999)
        if IS_SIGNED:
            bound_M = gl.where(scale_log2 < 0.0, -1.0, bound_M)
        return bound_M


@gluon.jit
def softmax_threshold(
    s_MN,
    m_M,
    l_ML,
    scale_log2,
    LIMIT: gl.constexpr,
    MAY_MASK_ROWS: gl.constexpr,
    TOP: gl.constexpr = 0.0,
    IS_NATURAL: gl.constexpr = False,
    IS_SIGNED: gl.constexpr = False,
    peaks_ML=None,
    BY_ROW: gl.constexpr = False,
):
    """One more tile against the old references, which move only where a score exceeds one by far.
    The new reference then gives that score a p of 2^TOP. If one moves, all of its warp do, or, if
    BY_ROW, those alone whose own scores exceed theirs by more than LIMIT.

    LIMIT: in the unit of references. p = 2^(s - m) may exceed 1, but by at most 2^LIMIT. Floats
    keep their relative precision, so nothing is lost. Each warp votes and branches for itself. The
    vote looks at scores before anything is subtracted: a reference far below them would leave too
    few of their digits for a new one. peaks_ML: their `lane_peaks`, if they are known.

    Returns p, the references, the sums before this tile, their factor and the output's, and whether
    the warp moved any reference. Only then must the output be scaled.
    """
    alpha_M = gl.full(m_M.shape, 1.0, gl.float32, m_M.type.layout)
    bound_M = bounds_of(m_M, scale_log2, LIMIT, IS_NATURAL, IS_SIGNED)
    if peaks_ML is None:
        must_rescale = vote_at_bounds(s_MN, bound_M)
    else:
        must_rescale = vote_at_bounds(peaks_ML, bound_M)
    if must_rescale != 0:
        peak_M = peaks(s_MN, scale_log2, IS_NATURAL, IS_SIGNED)
        # A row that has seen no key has nothing to compare with. Its reference, -inf, always moves.
        must_rescale = vote_above(peak_M - m_M, float_bits(LIMIT))
        if must_rescale != 0:
            new_m_M = gl.maximum(m_M, peak_M - TOP)
            if BY_ROW:
                # The factor of other rows is 1, which changes no bit.
                new_m_M = gl.where(peak_M - m_M > LIMIT, new_m_M, m_M)
            # The factor is the difference of the rounded references, which the exponentials use.
            alpha_M = powers(m_M - shift_of(new_m_M, MAY_MASK_ROWS), IS_NATURAL)
            l_ML = scale_rows(l_ML, alpha_M)
            m_M = new_m_M
    p_MN = exponentials(s_MN, shift_of(m_M, MAY_MASK_ROWS), scale_log2, IS_NATURAL)
    return p_MN, m_M, l_ML, alpha_M, must_rescale
