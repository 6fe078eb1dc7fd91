"""What is done to the scores ahead of the softmax: softcap, ALiBi and an additive bias.

Scores are raw until the softmax scales them, so that what is added is divided by that unit.
M query rows, N keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.compat import aggregate, optional


@aggregate
class ScoreMods:
    """alibi: slopes (B, H); bias: (B, H, M, N), a stride of 0 where it repeats; each may be None.
    per_unit: raw scores in one unit of the logits. longest_k: keys that a bias has, where sequences
    might be said to have more, else None."""

    alibi: gl.tensor | gl.constexpr
    stride_alibib: gl.tensor | gl.constexpr
    bias: gl.tensor | gl.constexpr
    stride_biasb: gl.tensor | gl.constexpr
    stride_biash: gl.tensor | gl.constexpr
    stride_biasm: gl.tensor | gl.constexpr
    stride_biasn: gl.tensor | gl.constexpr
    per_unit: gl.tensor | gl.constexpr
    longest_k: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        alibi,
        stride_alibib,
        bias,
        stride_biasb,
        stride_biash,
        stride_biasm,
        stride_biasn,
        per_unit,
        longest_k,
    ):
        self.alibi = optional(alibi)
        self.stride_alibib = optional(stride_alibib)
        self.bias = optional(bias)
        self.stride_biasb = optional(stride_biasb)
        self.stride_biash = optional(stride_biash)
        self.stride_biasm = optional(stride_biasm)
        self.stride_biasn = optional(stride_biasn)
        self.per_unit = optional(per_unit)
        self.longest_k = optional(longest_k)


@gluon.jit
def apply_softcap(s_MN, softcap_scale):
    """tanh(s scale / softcap), as 1 - 2 / (1 + 2^(s softcap_scale)); what follows scales it by
    softcap log2(e)."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(s_MN * softcap_scale))


@gluon.jit
def load_bias(score_mods, tile, row, col, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Bias of rows from `row` and keys from `col`, as it is stored; 0 without one. Rows and keys
    past the sequence repeat its last: their scores are hidden or never stored."""
    if score_mods.bias is None:
        return gl.to_tensor(0)
    else:
        rows_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
        key_N = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
        rows_M = gl.minimum(row + rows_M, tile.len_q - 1).to(gl.int64)
        base = score_mods.bias + tile.batch.to(gl.int64) * score_mods.stride_biasb
        base += tile.head.to(gl.int64) * score_mods.stride_biash
        base += gl.to_tensor(col).to(gl.int64) * score_mods.stride_biasn
        rows_M1 = (base + rows_M * score_mods.stride_biasm)[:, None]
        # Without a bound on the keys, neighbours are one load.
        if col + N <= tile.len_k:
            bias_MN = gl.load(rows_M1 + key_N[None, :] * score_mods.stride_biasn)
        else:
            last_N = gl.minimum(key_N, tile.len_k - 1 - col)
            bias_MN = gl.load(rows_M1 + last_N[None, :] * score_mods.stride_biasn)
        return bias_MN


@gluon.jit
def add_alibi_and_bias(s_MN, bias_MN, score_mods, tile, row, col):
    """Raw scores with ALiBi and bias."""
    M: gl.constexpr = s_MN.shape[0]
    N: gl.constexpr = s_MN.shape[1]
    layout: gl.constexpr = s_MN.type.layout
    if score_mods.alibi is not None:
        slope = gl.load(
            score_mods.alibi + tile.batch.to(gl.int64) * score_mods.stride_alibib + tile.head
        )
        key_N = gl.arange(0, N, layout=gl.SliceLayout(0, layout)) + (col - row - tile.off)
        rows_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
        distance_MN = key_N.to(gl.float32)[None, :] - rows_M.to(gl.float32)[:, None]
        s_MN -= gl.abs(distance_MN) * (slope * score_mods.per_unit)
    if score_mods.bias is not None:
        s_MN += bias_MN.to(gl.float32) * score_mods.per_unit
    return s_MN
