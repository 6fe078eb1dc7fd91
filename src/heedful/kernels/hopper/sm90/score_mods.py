"""Modifies scores before the softmax: softcap, ALiBi and an additive bias, dense or by relative
position.

Scores are raw until the softmax scales them, so the term of ALiBi is divided by that scale. Where
`unit` is there, scores are in natural units from here on. A bias needs that: -1e30 is then a number
like any other. ALiBi in float16 needs it too: far keys have scores so large that their rounded
maximum, in base 2, leaves probabilities that float16 does not hold.

M query rows, N keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def apply_softcap(s_MN, softcap_scale):
    """tanh(s scale / softcap), computed as 1 - 2 / (1 + 2^(s softcap_scale)). The softmax then
    scales it by softcap log2(e)."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(s_MN * softcap_scale))


@gluon.jit
def load_relative_bias(
    mods, tile, row, col, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr
):
    """`load_bias` of one by relative position."""
    rows_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    key_N = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    last = mods.relative.last
    first = row + tile.seq.off - col + (last + 1) // 2
    entry_MN = (rows_M + first)[:, None] - key_N[None, :]
    entry_MN = gl.minimum(gl.maximum(entry_MN, 0), last)
    base = mods.relative.ptr + tile.head.to(gl.int64) * mods.relative.stride_h
    return gl.load(base + entry_MN)


@gluon.jit
def load_bias(mods, tile, row, col, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """The bias of rows from `row` on and keys from `col` on, in its stored dtype; 0 if there is
    none. Rows and keys past the sequence repeat its last one: their scores are masked or never
    stored."""
    if mods.relative.ptr is not None:
        return load_relative_bias(mods, tile, row, col, M, N, layout)
    elif mods.bias.ptr is None:
        return gl.to_tensor(0)
    else:
        rows_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
        key_N = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
        rows_M = gl.minimum(row + rows_M, tile.seq.len_q - 1).to(gl.int64)
        base = mods.bias.ptr + tile.batch.to(gl.int64) * mods.bias.stride_b
        base += tile.head.to(gl.int64) * mods.bias.stride_h
        base += gl.to_tensor(col).to(gl.int64) * mods.bias.stride_n
        rows_M1 = (base + rows_M * mods.bias.stride_m)[:, None]
        # Without a bound on the keys, one load takes neighbouring elements.
        if col + N <= tile.seq.len_k:
            bias_MN = gl.load(rows_M1 + key_N[None, :] * mods.bias.stride_n)
        else:
            last_N = gl.minimum(key_N, tile.seq.len_k - 1 - col)
            bias_MN = gl.load(rows_M1 + last_N[None, :] * mods.bias.stride_n)
        return bias_MN


@gluon.jit
def add_alibi_and_bias(s_MN, bias_MN, mods, tile, row, col, unit):
    """Scores with ALiBi and a bias: raw or, where `unit` is there, in natural units. The fused
    multiply-adds are explicit, since the compiler does not contract expressions alike in every
    loop."""
    M: gl.constexpr = s_MN.shape[0]
    N: gl.constexpr = s_MN.shape[1]
    layout: gl.constexpr = s_MN.type.layout
    if mods.alibi is not None:
        slope = gl.load(mods.alibi + tile.batch.to(gl.int64) * mods.stride_alibib + tile.head)
        key_N = gl.arange(0, N, layout=gl.SliceLayout(0, layout)) + (col - row - tile.seq.off)
        rows_M = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
        distance_MN = key_N.to(gl.float32)[None, :] - rows_M.to(gl.float32)[:, None]
        distance_MN = gl.abs(distance_MN)
        if mods.unit is None:
            s_MN = gl.fma(distance_MN, -(slope * mods.per_unit), s_MN)
        else:
            s_MN = gl.fma(distance_MN, -slope, s_MN * unit)
            if mods.bias.ptr is not None or mods.relative.ptr is not None:
                s_MN = s_MN + bias_MN.to(gl.float32)
    elif mods.bias.ptr is not None or mods.relative.ptr is not None:
        s_MN = gl.fma(s_MN, unit, bias_MN.to(gl.float32))
    return s_MN
