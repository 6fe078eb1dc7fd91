"""Merging partial attention results over disjoint keys: out = sum_s w_s out_s / sum_s w_s with
w_s = exp(lse_s), plus the sink logit once. Shapes: M query rows, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args import CombineIO
from heedful.kernels.portable.scores import LN2, exponential, finite_or_zero
from heedful.kernels.portable.sequences import load_rows, row_base, store_rows, wide


@triton.jit
def combine_splits(
    io: CombineIO,
    rows,
    heads,
    splits,
    tiles,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """out (B, M, H, E) and lse (B, H, M) of partial results with a leading split axis."""
    row0 = (tl.program_id(0) % tiles) * BLOCK_M
    b = wide(tl.program_id(0) // tiles // heads)
    h = wide(tl.program_id(0) // tiles % heads)
    partial_out = row_base(io.partial_out, b, h, 0)
    partial_lse = io.partial_lse.ptr + (b * io.partial_lse.stride_b + h * io.partial_lse.stride_h)
    rows_M = row0 + tl.arange(0, BLOCK_M)
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for split in range(splits):
        place = wide(split)
        lse = partial_lse + place * io.partial_lse.stride_s
        lse_M = tl.load(lse + rows_M, mask=rows_M < rows, other=float("-inf"))
        part = partial_out + place * io.partial_out.stride_s
        part_ME = load_rows(
            part, io.partial_out.stride_n, row0, rows, HEAD_DIM_V, BLOCK_M, BLOCK_E, True
        )
        new_M = tl.maximum(m_M, lse_M)
        base_M = finite_or_zero(new_M)
        old_M = exponential(m_M - base_M, True)
        w_M = exponential(lse_M - base_M, True)
        # A part that saw no key weighs 0 whatever it holds.
        part_ME = tl.where((w_M == 0.0)[:, None], 0.0, part_ME.to(tl.float32))
        acc_ME = acc_ME * old_M[:, None] + part_ME * w_M[:, None]
        l_M = l_M * old_M + w_M
        m_M = new_M
    if io.sink is not None:
        sink_M = tl.zeros([BLOCK_M], tl.float32) + tl.load(io.sink + h)
        new_M = tl.maximum(m_M, sink_M)
        base_M = finite_or_zero(new_M)
        old_M = exponential(m_M - base_M, True)
        acc_ME *= old_M[:, None]
        l_M = l_M * old_M + exponential(sink_M - base_M, True)
        m_M = new_M
    acc_ME *= (1.0 / tl.where(l_M == 0.0, 1.0, l_M))[:, None]
    out = row_base(io.out, b, h, 0)
    store_rows(out, acc_ME, io.out.stride_n, row0, rows, HEAD_DIM_V, BLOCK_M, BLOCK_E)
    if io.lse.ptr is not None:
        lse_out = io.lse.ptr + (b * io.lse.stride_b + h * io.lse.stride_h)
        tl.store(lse_out + rows_M, m_M + tl.log2(l_M) * LN2, mask=rows_M < rows)
