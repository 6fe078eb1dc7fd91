"""Online softmax in base 2, which follows the maximum only when it must.

In the transposed 32x32 MFMA layout a row lies in two lanes, 32 apart. A reduction over keys is done
within each lane, and then takes one exchange. Sums stay spread over the two lanes until the last
tile: (M, 2).

Probabilities are exp2(score - base). A row's base is its reference, which may lag behind the
running maximum. A wave jumps over the rescale of its sums and outputs until one of its rows has
risen by `slack`. Rare rescaling is from FlashAttention-4,
https://github.com/Dao-AILab/flash-attention.

Shapes: M query rows, N key rows, D head dim, L lanes that share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A base below every score, but finite, so that differences from it are numbers.
LOWEST: gl.constexpr = gl.constexpr(-3.0e38)


@gluon.constexpr_function
def slack(dtype):
    """How far, in log2, a score may rise above its row's base before a rescale."""
    return 3 if dtype.is_fp8() else 8


@gluon.constexpr_function
def lift(dtype):
    """The log2 of a row's largest probability after a rescale. `dtype` has room for it beyond the
    slack, so that small probabilities keep their digits."""
    top = {"fp16": 15, "fp8e4nv": 8, "fp8e4b8": 7}.get(dtype.name, slack(dtype))
    return top - slack(dtype)


@gluon.jit
def larger(a, b):
    """max(a, b) of numbers in one instruction. The compiler would first quiet the NaNs of values
    whose origin it does not see."""
    return gl.inline_asm_elementwise(
        "v_max_f32 $0, $1, $2", "=v,v,v", [a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def row_max(s_MN):
    """The largest score of each row."""
    M: gl.constexpr = s_MN.shape[0]
    N: gl.constexpr = s_MN.shape[1]
    by_lane = s_MN.reshape([M, N // 8, 2, 4]).permute([0, 2, 1, 3]).reshape([M, 2, N // 2])
    top_M = gl.reduce(gl.max(by_lane, 2), 1, larger)
    return gl.convert_layout(top_M, gl.SliceLayout(1, s_MN.type.layout))


@gluon.jit
def lane_sums(p_MN):
    """Sums over the keys that a lane holds: (M, N) -> (M, 2). It holds four neighbours of every
    eight keys. These are kept apart as long as possible, because the vector unit adds in pairs."""
    M: gl.constexpr = p_MN.shape[0]
    N: gl.constexpr = p_MN.shape[1]
    return gl.sum(gl.sum(p_MN.reshape([M, N // 8, 2, 4]), 1), 2)


@gluon.jit
def no_keys(M: gl.constexpr, N: gl.constexpr, D: gl.constexpr, MFMA: gl.constexpr):
    """(base, l, acc) of rows that have seen no key, for tiles of N keys."""
    base_M = gl.full([M], LOWEST, gl.float32, gl.SliceLayout(1, MFMA))
    l_ML = lane_sums(gl.zeros([M, N], gl.float32, MFMA))
    return base_M, l_ML, gl.zeros([M, D], gl.float32, MFMA)


@gluon.jit
def total(l_ML, base_M):
    """Sums of whole rows, in the layout of base_M."""
    return gl.convert_layout(gl.sum(l_ML, 1), base_M.type.layout)


@gluon.jit
def any_lane_above(x_M, LIMIT: gl.constexpr):
    """1 if x_M > LIMIT in any lane of the wave, else 0. It is a scalar register, so that `if` is a
    scalar branch. Unlike other scalars, each wave has its own: code that depends on it must not
    affect other waves."""
    WORDS: gl.constexpr = (
        f"v_cmp_lt_f32_e32 vcc, {float(LIMIT)}, $1\ns_cmp_lg_u64 vcc, 0\ns_cselect_b32 $0, 1, 0"
    )
    return gl.inline_asm(WORDS, "=s,v,~{vcc},~{scc}", [x_M], gl.int32, is_pure=True)


@gluon.jit
def rescale(base_M, top_M, scale_log2, l_ML, acc_MD, LIFT: gl.constexpr, HIGHEST: gl.constexpr):
    """(base, l, acc) for this tile, whose largest raw scores are top_M.

    LIFT: log2 of the largest probability after a rescaling. HIGHEST: log2 of the probability that
    triggers one.
    """
    if any_lane_above(top_M * scale_log2 - base_M, HIGHEST) != 0:
        new_M = larger(base_M, top_M * scale_log2 - LIFT)
        alpha_M = gl.exp2(base_M - new_M)
        base_M = new_M
        l_ML = l_ML * gl.convert_layout(alpha_M, gl.SliceLayout(1, l_ML.type.layout))[:, None]
        acc_MD = acc_MD * alpha_M[:, None]
    return base_M, l_ML, acc_MD
