"""Online softmax of one warpgroup's rows, in base 2, with the row sum left spread over lanes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import inline_asm


@gluon.jit
def lane_sums(p_MN):
    """Sums over the keys that one lane holds: (M, N) -> (M, 4).

    In a WGMMA accumulator a row lies in four lanes, two neighbouring keys in each of every eight.
    Adding up the four waits until the last tile, so that the loop has no shuffles for it.
    """
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    return gl.sum(gl.sum(p_MN.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(x_ME, alpha_M):
    """Multiplies row m by alpha_M[m]."""
    return x_ME * gl.convert_layout(alpha_M, gl.SliceLayout(1, x_ME.type.layout))[:, None]


@gluon.jit
def shift_of(m_M, MAY_MASK_ROWS: gl.constexpr = True):
    """What to subtract for a reference: of a row that may have seen no key it is -inf, and
    -inf - -inf is NaN."""
    if MAY_MASK_ROWS:
        m_M = gl.where(m_M == float("-inf"), 0.0, m_M)
    return m_M


@gluon.jit
def exponentials(s_MN, shift_M, scale_log2):
    """p against a reference: infinite where it overflows, infinite or NaN in a row without one."""
    return gl.exp2(s_MN * scale_log2 - shift_M[:, None])


@gluon.jit
def softmax_exact(s_MN, m_M, l_ML, scale_log2, MAY_MASK_ROWS: gl.constexpr):
    """One more tile: p, new maximum, new sums, and what the output so far must be scaled by."""
    new_m_M = gl.maximum(m_M, gl.max(s_MN, 1) * scale_log2)
    shift_M = shift_of(new_m_M, MAY_MASK_ROWS)
    alpha_M = gl.exp2(m_M - shift_M)
    p_MN = exponentials(s_MN, shift_M, scale_log2)
    return p_MN, new_m_M, scale_rows(l_ML, alpha_M) + lane_sums(p_MN), alpha_M


@gluon.constexpr_function
def threshold_limit(dtype):
    """How far above its row's reference a score may be, in log2, as the bits of a float32: p must
    stay finite in `dtype`, and a sum of p v in float32."""
    return 0x42000000 if dtype == gl.bfloat16 else 0x41400000  # 32.0, 12.0


@gluon.constexpr_function
def _vote_above(outputs, inputs):
    """Assembly: does any lane of the warp hold a value above the limit? As integers, non-negative
    floats keep their order and negative ones are all below, and sm_90 takes three at a time."""
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
    """Whether a warp has a value above the limit, or NaN."""
    bits = values.to(gl.int32, bitcast=True)
    kinds: gl.constexpr = ("=r", "r", "r")
    return inline_asm(_vote_above, kinds, [bits, LIMIT_BITS], gl.int32, is_pure=True)


@gluon.jit
def softmax_threshold(
    s_MN,
    m_M,
    l_ML,
    scale_log2,
    LIMIT_BITS: gl.constexpr,
    MAY_MASK_ROWS: gl.constexpr,
    TOP: gl.constexpr = 0.0,
):
    """One more tile against old references, which move only where a score passes one by far; its p
    is then 2^TOP.

    p = 2^(s - m) may then exceed 1, by at most 2^LIMIT: floats keep their relative precision, so
    nothing is lost. The vote is a warp's own, and so is the branch. Returns p, references, the sums
    before, what they and the output so far are scaled by, and whether the warp moved any reference:
    only then must the output be scaled.
    """
    x_MN = s_MN * scale_log2 - shift_of(m_M, MAY_MASK_ROWS)[:, None]
    if MAY_MASK_ROWS:
        # A row that has seen no key has nothing to compare with: always rescale.
        unset_M = m_M == float("-inf")
        force_M = gl.where(unset_M, 0x7FFFFFFF, 0)
        bits_MN = x_MN.to(gl.int32, bitcast=True)
        kinds: gl.constexpr = ("=r", "r", "r", "r")
        operands = [bits_MN, force_M, LIMIT_BITS]
        must_rescale = inline_asm(_vote_above, kinds, operands, gl.int32, is_pure=True)
    else:
        must_rescale = vote_above(x_MN, LIMIT_BITS)
    alpha_M = gl.full(m_M.shape, 1.0, gl.float32, m_M.type.layout)
    if must_rescale != 0:
        delta_M = gl.max(x_MN, 1)
        if TOP != 0.0:
            delta_M -= TOP
        risen_M = gl.maximum(delta_M, 0.0)
        if MAY_MASK_ROWS:
            m_M = gl.where(unset_M, delta_M, m_M + risen_M)
            alpha_M = gl.where(unset_M, 1.0, gl.exp2(-risen_M))
            risen_M = gl.where(unset_M & (delta_M > float("-inf")), delta_M, risen_M)
        else:
            m_M += risen_M
            alpha_M = gl.exp2(-risen_M)
        x_MN = x_MN - risen_M[:, None]
        l_ML = scale_rows(l_ML, alpha_M)
    return gl.exp2(x_MN), m_M, l_ML, alpha_M, must_rescale
