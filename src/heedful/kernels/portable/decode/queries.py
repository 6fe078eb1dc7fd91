"""Loads the queries of a decode as operands of products, and the score modifiers of their rows.

Shapes: M rows (position, head of the KV head), D qk dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import Rows
from heedful.kernels.args.portable import CacheAppend
from heedful.kernels.common.scores import HeadMods, descaled
from heedful.kernels.portable.cache.rotary import rotated
from heedful.kernels.portable.decode.cache import has_own_scales, rest_words


@triton.jit
def fitted(parts, BLOCK_M: tl.constexpr):
    """(parts of queries in float16, divisor of each row [M, 1]). The divisor is a power of two that
    makes the largest magnitude of a row less than 4."""
    size_M = tl.zeros([BLOCK_M], tl.float32)
    for n in tl.static_range(len(parts)):
        size_M = tl.maximum(size_M, tl.max(tl.abs(parts[n].to(tl.float32)), 1))
    # The exponent of the largest magnitude, clamped so that both the power and its inverse are
    # normal.
    bits_M = size_M.to(tl.int32, bitcast=True) & 0x7F800000
    bits_M = tl.minimum(tl.maximum(bits_M, 1 << 23), 253 << 23)
    inverse_M = ((254 << 23) - bits_M).to(tl.float32, bitcast=True)
    made = ()
    for n in tl.static_range(len(parts)):
        made = made + ((parts[n].to(tl.float32) * inverse_M[:, None]).to(tl.float16),)
    return made, bits_M.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def query_columns(row_M, dims, exists_M, place_M, append: CacheAppend, DIM: tl.constexpr):
    """Columns `dims` of queries, rotated if the call has rotary tables. row_M: addresses of the
    rows. place_M: their positions in the cache."""
    ok_MD = exists_M[:, None] & (dims < DIM)[None, :]
    if append.rotary.cos is None:
        return tl.load(row_M[:, None] + dims[None, :], mask=ok_MD, other=0.0)
    else:
        # Rotated queries are rounded to their own dtype, as if they had been rotated before the
        # call.
        turned_MD = rotated(row_M, dims, ok_MD, place_M, append.rotary)
        return turned_MD.to(row_M.dtype.element_ty)


@triton.jit
def load_query_parts(
    q: Rows, pos_M, head_M, place, params, DTYPE: tl.constexpr, KEYS: tl.constexpr
):
    """(parts, factor for scores) of the queries of a tile.

    parts: a tuple with an entry for each slice of a row and each value of its words; then entries
    for the columns of keys past the values that lie in them. The factor is a tensor [M, 1] if DTYPE
    differs from KEYS, the dtype of the product, else 1.
    """
    D: tl.constexpr = params.tile.HEAD_DIM
    BLOCK_D: tl.constexpr = params.tile.BLOCK_D
    VALUES: tl.constexpr = params.tile.VALUES
    base = q.ptr + place.b * q.stride_b + place.seq.token_q * q.stride_n
    row_M = base + (pos_M.to(tl.int64) * q.stride_n + head_M * q.stride_h)
    exists_M = pos_M < place.seq.len_q
    place_M = pos_M
    if params.append.io.cache_seqlens is not None:
        place_M = tl.load(params.append.io.cache_seqlens + place.b) + params.append.advance * pos_M
    parts = ()
    for s in tl.static_range(params.tile.SLICES_D):
        for i in tl.static_range(VALUES):
            dims = (s * BLOCK_D + tl.arange(0, BLOCK_D)) * VALUES + i
            part = query_columns(row_M, dims, exists_M, place_M, params.append, D)
            parts = parts + (part.to(DTYPE),)
    OWNS: tl.constexpr = has_own_scales(params.tile.V_IN_K, params.descales.KV_GROUP)
    EACH: tl.constexpr = 1 if OWNS else VALUES
    REST: tl.constexpr = rest_words(params.tile.V_IN_K, D, params.tile.HEAD_DIM_V, EACH)
    if REST > 0:
        for i in tl.static_range(EACH):
            dims = params.tile.HEAD_DIM_V + tl.arange(0, REST) * EACH + i
            part = query_columns(row_M, dims, exists_M, place_M, params.append, D)
            parts = parts + (part.to(DTYPE),)
    times = 1.0
    if DTYPE != KEYS:
        parts, times = fitted(parts, params.tile.BLOCK_M)
    return parts, times


@triton.jit
def head_of(times, head_M, place, params):
    """(`HeadMods` of a tile's rows, factor of the results). times: factor for products
    with keys."""
    scale = descaled(params.mods.scale, params.descales.q, place) * times
    factor = 1.0
    if params.descales.KV_GROUP == 0:
        scale = descaled(scale, params.descales.k, place)
        factor = descaled(factor, params.descales.v, place)
    slope = 0.0
    tree = 0
    if params.mods.alibi is not None:
        slopes = params.mods.alibi + place.b * params.mods.stride_alibib + head_M
        slope = tl.load(slopes)[:, None]
    if params.mask.tree.ptr is not None:
        tree = params.mask.tree.ptr + place.b * params.mask.tree.stride_b
    return HeadMods(scale, slope, 0, 0, tree, 0, -1), factor
