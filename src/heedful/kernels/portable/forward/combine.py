"""Merges partial attention results over disjoint keys: out = sum_s w_s out_s / sum_s w_s with w_s =
exp(lse_s), plus the sink logit once.

The kernel is `combine_splits`. It has one program for each tile of rows of each head, and runs
after any forward kernel that splits keys, and to merge results over a shared prefix.

A log-sum-exp may come as two numbers, lse and rest, see common/log_sum.py. The largest one, from
which the weights are computed, then has two numbers as well.

Shapes: S splits, M query rows, E v dim.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from heedful.kernels.args.portable import CombineIO
from heedful.kernels.common.constants import LN2
from heedful.kernels.common.rows import row_base, store_rows, wide
from heedful.kernels.common.scores import exponential, finite_or_zero


@triton.jit
def weights(m_M, rest_M, lse_SM, rest_SM):
    """(new reference, its rest, factor for earlier sums, weights of parts). rest_SM: None if a
    log-sum-exp is one number."""
    new_M = tl.maximum(m_M, tl.max(lse_SM, 0))
    base_M = finite_or_zero(new_M)
    old_M = m_M - base_M
    x_SM = lse_SM - base_M[None, :]
    if rest_SM is not None:
        # If log-sum-exps round to the same number, a lesser one may have been taken as the largest.
        old_M += rest_M
        # Kernels that clear parts of uncovered rows write no rest for them.
        x_SM += tl.where(lse_SM == float("-inf"), 0.0, rest_SM)
        rest_M = finite_or_zero(tl.maximum(old_M, tl.max(x_SM, 0)))
        old_M -= rest_M
        x_SM -= rest_M[None, :]
    return new_M, rest_M, exponential(old_M, True), exponential(x_SM, True)


@triton.jit
def with_parts(m_M, rest_M, l_M, acc_ME, lse_SM, rest_SM, part_SME):
    """(maximum, its rest, sum, outputs) of the parts merged so far and of S more parts."""
    new_M, rest_M, old_M, w_SM = weights(m_M, rest_M, lse_SM, rest_SM)
    # A part that saw no key has weight 0, whatever its output holds.
    part_SME = tl.where((w_SM == 0.0)[:, :, None], 0.0, part_SME * w_SM[:, :, None])
    acc_ME = acc_ME * old_M[:, None] + tl.sum(part_SME, 0)
    return new_M, rest_M, l_M * old_M + tl.sum(w_SM, 0), acc_ME


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
    BLOCK_S: tl.constexpr,
    BEGINS_EARLY: tl.constexpr,
):
    """Stores out (B, M, H, E) and lse (B, H, M) of partial results with a leading split axis, and
    of one part in memory of its own, if there is one.

    BLOCK_S: splits that are loaded at once, so that none waits for the one before it. BEGINS_EARLY:
    the launch is programmatic and may start before the kernel that computes the parts has ended, so
    this kernel waits for it.
    """
    if BEGINS_EARLY:
        cuda.gdc_wait()
    row0 = (tl.program_id(0) % tiles) * BLOCK_M
    b = wide(tl.program_id(0) // tiles // heads)
    h = wide(tl.program_id(0) // tiles % heads)
    partial_out = row_base(io.partial_out, b, h, row0)
    row_lse = b * io.partial_lse.stride_b + h * io.partial_lse.stride_h
    partial_lse = io.partial_lse.ptr + row_lse
    rows_M = row0 + tl.arange(0, BLOCK_M)
    dims_E = tl.arange(0, BLOCK_E)
    exists_M = rows_M < rows
    exists_ME = exists_M[:, None] & (dims_E < HEAD_DIM_V)[None, :]
    at_ME = tl.arange(0, BLOCK_M)[:, None] * io.partial_out.stride_n + dims_E[None, :]
    HAS_REST: tl.constexpr = io.partial_rest is not None
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    rest_M = tl.zeros([BLOCK_M], tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    acc_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for split0 in range(0, splits, BLOCK_S):
        split_S = split0 + tl.arange(0, BLOCK_S)
        exists_S = split_S < splits
        at_SM = (split_S * io.partial_lse.stride_s)[:, None] + rows_M[None, :]
        ok_SM = exists_S[:, None] & exists_M[None, :]
        lse_SM = tl.load(partial_lse + at_SM, mask=ok_SM, other=float("-inf"))
        # Other libraries write +inf for a part without keys.
        lse_SM = tl.where(lse_SM == float("inf"), float("-inf"), lse_SM)
        rest_SM = None
        if HAS_REST:
            rest_SM = tl.load(io.partial_rest + row_lse + at_SM, mask=ok_SM, other=0.0)
        part_SME = partial_out + (split_S * io.partial_out.stride_s)[:, None, None]
        ok_SME = exists_S[:, None, None] & exists_ME[None, :, :]
        part_SME = tl.load(part_SME + at_ME[None, :, :], mask=ok_SME, other=0.0).to(tl.float32)
        m_M, rest_M, l_M, acc_ME = with_parts(m_M, rest_M, l_M, acc_ME, lse_SM, rest_SM, part_SME)
    if io.apart_out.ptr is not None:
        apart_out = row_base(io.apart_out, b, h, row0)
        at_ME = tl.arange(0, BLOCK_M)[:, None] * io.apart_out.stride_n + dims_E[None, :]
        part_ME = tl.load(apart_out + at_ME, mask=exists_ME, other=0.0).to(tl.float32)
        row_lse = b * io.apart_lse.stride_b + h * io.apart_lse.stride_h
        lse_M = tl.load(io.apart_lse.ptr + row_lse + rows_M, mask=exists_M, other=float("-inf"))
        rest_SM = None
        if HAS_REST:
            own_M = tl.load(io.apart_rest + row_lse + rows_M, mask=exists_M, other=0.0)
            rest_SM = own_M[None, :]
        m_M, rest_M, l_M, acc_ME = with_parts(
            m_M, rest_M, l_M, acc_ME, lse_M[None, :], rest_SM, part_ME[None, :, :]
        )
    if io.sink is not None:
        sink_SM = tl.zeros([1, BLOCK_M], tl.float32) + tl.load(io.sink + h)
        rest_SM = None
        if HAS_REST:
            rest_SM = tl.zeros([1, BLOCK_M], tl.float32)
        m_M, rest_M, old_M, w_SM = weights(m_M, rest_M, sink_SM, rest_SM)
        acc_ME *= old_M[:, None]
        l_M = l_M * old_M + tl.sum(w_SM, 0)
    acc_ME *= (1.0 / tl.where(l_M == 0.0, 1.0, l_M))[:, None]
    out = row_base(io.out, b, h, 0)
    store_rows(out, acc_ME, io.out.stride_n, row0, rows, HEAD_DIM_V)
    if io.lse.ptr is not None:
        lse_out = io.lse.ptr + (b * io.lse.stride_b + h * io.lse.stride_h)
        lse_M = m_M + (rest_M + tl.log2(l_M) * LN2) if HAS_REST else m_M + tl.log2(l_M) * LN2
        tl.store(lse_out + rows_M, lse_M, mask=rows_M < rows)
        if io.rest is not None:
            rest_M = (m_M - lse_M) + (rest_M + tl.log2(l_M) * LN2)
            rest_M = tl.where(tl.abs(lse_M) < float("inf"), rest_M, 0.0)
            rest_out = io.rest + (b * io.lse.stride_b + h * io.lse.stride_h)
            tl.store(rest_out + rows_M, rest_M, mask=rows_M < rows)
