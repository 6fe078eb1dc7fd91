"""Stores the results of a segment, as far as this is the same in every layout: the sink as one more
logit, the log-sum-exp, rows of sequences without keys, and the sums of partial results.

A segment that is a whole work tile stores its rows at once. Other segments leave partial results in
scratch memory, and the program that finishes the work tile merges them. The layout of a row's
columns, and how many segments are merged at once, are up to each kernel.

Shapes: M rows, P segments, E columns.
"""

import triton
import triton.language as tl

from heedful.kernels.common.constants import LN2, LOG2E
from heedful.kernels.common.log_sum import log_sum_exp
from heedful.kernels.common.scores import finite_or_zero
from heedful.kernels.common.sequences import seqlens_of


@triton.jit
def with_sink(sink, head_M, m_M, l_M, IS_NATURAL: tl.constexpr):
    """(maximum, sum, factor for the results so far) of rows, with the sink as one more logit of
    each row. IS_NATURAL: maxima are in natural units, else in base 2."""
    if sink is None:
        return m_M, l_M, 1.0
    else:
        logit_M = tl.load(sink + head_M)
        top_M = tl.maximum(m_M, logit_M if IS_NATURAL else logit_M * LOG2E)
        base_M = finite_or_zero(top_M)
        if IS_NATURAL:
            old_M = tl.exp2((m_M - base_M) * LOG2E)
            own_M = tl.exp2((logit_M - base_M) * LOG2E)
        else:
            old_M = tl.exp2(m_M - base_M)
            own_M = tl.exp2(tl.fma(logit_M, LOG2E, -base_M))
        return top_M, l_M * old_M + own_M, old_M


@triton.jit
def store_lse(io, start, head_M, pos_M, m_M, l_M, used_M, stored_M, IS_NATURAL: tl.constexpr):
    """Stores the log-sum-exp of rows and, if `io.rest` exists, the part that its rounding lost.
    start: offset of the sequence's first element. Rows that are stored but not in use get -inf."""
    if io.rest is None:
        lse_M = m_M + tl.log2(l_M) * LN2 if IS_NATURAL else (m_M + tl.log2(l_M)) * LN2
    else:
        lse_M, rest_M = log_sum_exp(m_M, l_M, not IS_NATURAL)
        rest = io.rest + start
        rest_M = tl.where(used_M, rest_M, 0.0)
        tl.store(rest + head_M * io.lse.stride_h + pos_M, rest_M, mask=stored_M)
    lse_M = tl.where(used_M, lse_M, float("-inf"))
    lse = io.lse.ptr + start
    tl.store(lse + head_M * io.lse.stride_h + pos_M, lse_M, mask=stored_M)


@triton.jit
def store_empty_rows(row_M, dims_E, g, io, sink, params):
    """Stores out and lse of those rows of KV head g whose sequence has no keys. row_M: numbers of
    rows over all sequences, one sequence after the other."""
    group = params.shape.heads_q // params.shape.heads_k
    rows = params.seqs.seqlen_q * group
    exists_M = row_M < params.shape.batch * rows
    b_M = tl.minimum(row_M // rows, params.shape.batch - 1)
    pos_M = row_M % rows // group
    head_M = g * group + row_M % group
    seq = seqlens_of(b_M, params.seqs, params.mask)
    empty_M = exists_M & (seq.len_k <= 0)
    b_M = b_M.to(tl.int64)
    at_M = b_M * io.out.stride_b + pos_M * io.out.stride_n + head_M * io.out.stride_h
    ok_ME = empty_M[:, None] & (dims_E < params.tile.HEAD_DIM_V)[None, :]
    tl.store(io.out.ptr + at_M[:, None] + dims_E[None, :], 0.0, mask=ok_ME)
    if io.lse.ptr is not None:
        lse_M = float("-inf")
        if sink is not None:
            lse_M = tl.where(pos_M < seq.len_q, tl.load(sink + head_M), lse_M)
        at_M = b_M * io.lse.stride_b + head_M * io.lse.stride_h + pos_M
        tl.store(io.lse.ptr + at_M, lse_M, mask=empty_M)
        if io.rest is not None:
            tl.store(io.rest + at_M, 0.0, mask=empty_M)


@triton.jit
def store_sums(sums_M, m_M, l_M, kept_M):
    """Stores the maximum and the sum of partial results' rows. They stay two numbers, since a
    log-sum-exp that is far from 0 has no digits left for the sum."""
    tl.store(sums_M, m_M, mask=kept_M)
    tl.store(sums_M + 1, l_M, mask=kept_M)


@triton.jit
def load_sums(sums_PM, exists_P1):
    """(maximum, sum) of partial results' rows; -inf and 0 for segments that do not exist."""
    top_PM = tl.load(sums_PM, mask=exists_P1, other=float("-inf"), cache_modifier=".cg")
    sum_PM = tl.load(sums_PM + 1, mask=exists_P1, other=0.0, cache_modifier=".cg")
    return top_PM, sum_PM
