"""Clears the rows of packed results that no sequence covers: those before the first sequence and
those after the last.

No work tile covers these rows, so attention kernels and the varlen scheduler call `clear_gaps`
beside their work. Shapes: H heads, E head dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.kinds import SplitRows, SplitRowVector
from heedful.kernels.common.rows import wide
from heedful.kernels.common.sequences import within

# Rows that a program clears at a time.
GAP_ROWS = tl.constexpr(16)


@triton.jit
def clear_gaps(
    out: SplitRows,
    lse: SplitRowVector,
    split,
    cu_seqlens,
    total,
    batch,
    heads,
    share,
    shares,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Clears this program's share of the rows that no sequence covers: out (total, heads, DIM)
    becomes 0, lse (heads, total) becomes -inf. Either array may be absent.

    share, shares: this program's number, and how many programs divide the rows among them.
    cu_seqlens: (batch + 1,). BLOCK: the power of two from DIM on. split: the leading index of both
    arrays.
    """
    before, behind, gaps = gaps_of(cu_seqlens, total, batch)
    dims = tl.arange(0, BLOCK)
    for block in range(share, tl.cdiv(gaps, GAP_ROWS) * heads, shares):
        rows = tl.arange(0, GAP_ROWS)
        clear_block(block, rows, dims, before, behind, gaps, out, lse, split, heads, DIM)


@triton.jit
def gaps_of(cu_seqlens, total, batch):
    """(rows before the first sequence, first row after the last sequence, count of both kinds of
    rows)."""
    before = within(tl.load(cu_seqlens), 0, total)
    behind = within(tl.load(cu_seqlens + batch), before, total)
    return before, behind, before + (total - behind)


@triton.jit
def clear_block(
    block,
    gap_rows,
    dims,
    before,
    behind,
    gaps,
    out: SplitRows,
    lse: SplitRowVector,
    split,
    heads,
    DIM: tl.constexpr,
):
    """Clears one block: GAP_ROWS of the uncovered rows, of one head.

    block: number of the block, heads innermost. gap_rows: 0 to GAP_ROWS - 1. dims: 0 to a power of
    two from DIM on. Both index tensors may have any layout. before, behind, gaps: the results of
    `gaps_of`.
    """
    h = wide(block % heads)
    rows = block // heads * GAP_ROWS + gap_rows
    exists = rows < gaps
    tokens = wide(tl.where(rows < before, rows, rows - before + behind))
    if out.ptr is not None:
        base = out.ptr + split * out.stride_s + h * out.stride_h
        ptrs = base + tokens[:, None] * out.stride_n + dims[None, :]
        tl.store(ptrs, 0.0, mask=exists[:, None] & (dims < DIM)[None, :])
    if lse.ptr is not None:
        starts = lse.ptr + split * lse.stride_s + h * lse.stride_h
        tl.store(starts + tokens, float("-inf"), mask=exists)
