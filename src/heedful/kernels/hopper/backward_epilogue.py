"""dQ out of its float32 sums: scaled, rounded, and in order again.

M query rows, D qk dim.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper_backward import BackwardEpilogueIO, HopperBackwardSizes
from heedful.kernels.args.shared import Sequences
from heedful.kernels.common.sequences import sequence
from heedful.kernels.hopper.backward_prologue import accum_begin
from heedful.kernels.portable.sequences import row_base, store_rows, wide


@triton.jit
def load_share(sums, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A consumer's share of a query tile as (ROWS, COLS), from the order of its registers: columns
    by eight, warp, row of eight, columns by two, first or second eight rows, column."""
    flat = tl.load(sums + tl.arange(0, ROWS * COLS))
    parts = flat.reshape([COLS // 8, ROWS // 16, 8, 4, 2, 2])
    return parts.permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, COLS])


@triton.jit
def backward_epilogue(
    io: BackwardEpilogueIO,
    seqs: Sequences,
    sizes: HopperBackwardSizes,
    q_blocks,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dq (B, M, H, D), zeros in rows past the used length. A program each for BLOCK_M rows of a
    query head, as in the prologue. Consumers' shares are halves of 128 rows, or of the columns of
    64. D: columns of dq, of BLOCK_D in dq_accum."""
    pid = tl.program_id(0)
    row0 = (pid % q_blocks) * BLOCK_M
    heads = sizes.heads_k * sizes.group
    h = wide(pid // q_blocks % heads)
    b = wide(pid // q_blocks // heads)
    token, len_q, stored_q = sequence(b, seqs.cu_q, seqs.used_q, None, seqs.seqlen_q)
    if row0 >= stored_q:
        return
    accum_row = h * sizes.accum_rows + accum_begin(b, seqs, BLOCK_M) + row0
    sums = io.dq_accum + accum_row * BLOCK_D
    dq = row_base(io.dq, b, h, token)
    ROWS: tl.constexpr = 64
    SHARES: tl.constexpr = 2
    COLS: tl.constexpr = BLOCK_D * BLOCK_M // (ROWS * SHARES)
    for share in tl.static_range(SHARES):
        dq_MD = load_share(sums + share * ROWS * COLS, ROWS, COLS)
        row = row0 + (share * ROWS if BLOCK_M > ROWS else 0)
        col = 0 if BLOCK_M > ROWS else share * COLS
        used_M = row + tl.arange(0, ROWS) < len_q
        dq_MD = tl.where(used_M[:, None], dq_MD * sizes.scale, 0.0)
        store_rows(dq + col, dq_MD, io.dq.stride_n, row, stored_q, D - col)
