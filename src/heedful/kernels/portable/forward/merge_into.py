"""Merges the attention over other keys into results, in place: the running sums of a ring.

The kernel is `merge_part`, with one program for each tile of rows of each head.

Shapes: M query rows, E v dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.portable import MergeIntoIO
from heedful.kernels.common.constants import LN2
from heedful.kernels.common.rows import load_rows, row_base, store_rows, wide
from heedful.kernels.common.scores import exponential, finite_or_zero


@triton.jit
def merge_part(
    io: MergeIntoIO,
    rows,
    heads,
    tiles,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Stores out (B, M, H, E) and lse (B, H, M) of their keys and those of the part. A row that saw
    no key of either weighs nothing there, whatever its output holds."""
    row0 = (tl.program_id(0) % tiles) * BLOCK_M
    b = wide(tl.program_id(0) // tiles // heads)
    h = wide(tl.program_id(0) // tiles % heads)
    rows_M = row0 + tl.arange(0, BLOCK_M)
    exists_M = rows_M < rows
    lse = io.lse.ptr + b * io.lse.stride_b + h * io.lse.stride_h
    part_lse = io.part_lse.ptr + b * io.part_lse.stride_b + h * io.part_lse.stride_h
    lse_M = tl.load(lse + rows_M, mask=exists_M, other=float("-inf"))
    part_M = tl.load(part_lse + rows_M, mask=exists_M, other=float("-inf"))
    # Other libraries write +inf for rows without keys.
    lse_M = tl.where(lse_M == float("inf"), float("-inf"), lse_M)
    part_M = tl.where(part_M == float("inf"), float("-inf"), part_M)
    top_M = tl.maximum(lse_M, part_M)
    base_M = finite_or_zero(top_M)
    old_M = exponential(lse_M - base_M, True)
    new_M = exponential(part_M - base_M, True)
    out = row_base(io.out, b, h, 0)
    part = row_base(io.part, b, h, 0)
    out_ME = load_rows(out, io.out.stride_n, row0, rows, HEAD_DIM_V, BLOCK_M, BLOCK_E, True)
    part_ME = load_rows(part, io.part.stride_n, row0, rows, HEAD_DIM_V, BLOCK_M, BLOCK_E, True)
    # Every warp has its numbers before any of them is replaced.
    tl.debug_barrier()
    out_ME = tl.where((old_M == 0.0)[:, None], 0.0, out_ME * old_M[:, None])
    part_ME = part_ME.to(tl.float32) * new_M[:, None]
    out_ME += tl.where((new_M == 0.0)[:, None], 0.0, part_ME)
    total_M = old_M + new_M
    out_ME *= (1.0 / tl.where(total_M == 0.0, 1.0, total_M))[:, None]
    store_rows(out, out_ME, io.out.stride_n, row0, rows, HEAD_DIM_V)
    tl.store(lse + rows_M, top_M + tl.log2(total_M) * LN2, mask=exists_M)
