"""Rotary position embedding (Su et al. 2021). The cache update, and decodes that append, call it.
Shapes: N rows, D head dim."""

import triton
import triton.language as tl

from heedful.kernels.args.portable import Rotary
from heedful.kernels.common.sequences import within


@triton.jit
def rotated(row_N, dims, exists_ND, place_N, rotary: Rotary):
    """Columns `dims` of rows, in float32, with the first 2 * half columns of a row rotated; 0 where
    exists_ND is false. row_N: addresses of the rows. place_N: their positions in the cache."""
    half = rotary.half
    if rotary.IS_INTERLEAVED:
        partner = dims ^ 1
        angle = dims // 2
        is_first = dims % 2 == 0
    else:
        partner = tl.where(dims < half, dims + half, dims - half)
        angle = tl.where(dims < half, dims, dims - half)
        is_first = dims < half
    rotates_ND = exists_ND & (dims < 2 * half)[None, :]
    x_ND = tl.load(row_N[:, None] + dims[None, :], mask=exists_ND, other=0.0).to(tl.float32)
    other_ND = tl.load(row_N[:, None] + partner[None, :], mask=rotates_ND, other=0.0).to(tl.float32)
    positions = within(place_N + rotary.position0, 0, rotary.positions - 1)
    angles = positions.to(tl.int64)[:, None] * rotary.stride_n + angle[None, :]
    c_ND = tl.load(rotary.cos + angles, mask=rotates_ND, other=1.0).to(tl.float32)
    s_ND = tl.load(rotary.sin + angles, mask=rotates_ND, other=0.0).to(tl.float32)
    return x_ND * c_ND + tl.where(is_first[None, :], -other_ND, other_ND) * s_ND
