"""The epilogue of the backward: converts the float32 sums of dQ to rows, scaled and rounded. If the
visits of key tiles are split, it also adds the splits of dK and dV.

The kernel is `backward_epilogue`, launched by `launch/bind/hopper_backward.py` after the main
kernel. M query rows, N keys, D qk dim, E v dim.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from heedful.kernels.args.hopper_backward import (
    BackwardEpilogueIO,
    BackwardEpilogueTile,
    BackwardTail,
    HopperBackwardSizes,
)
from heedful.kernels.args.shared import Sequences
from heedful.kernels.common.rows import row_base, store_rows, wide
from heedful.kernels.common.sequences import sequence, tile_of_sequences
from heedful.kernels.hopper.backward.columns import share_columns, sum_columns, sum_count
from heedful.kernels.hopper.backward.p_scale import p_descale
from heedful.kernels.hopper.backward.prologue import accum_begin

# Rows of one product, whose sums are contiguous.
ROWS: tl.constexpr = tl.constexpr(64)


@triton.jit
def load_share(sums, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A share of a query tile as (ROWS, COLS). In memory it is in the order of registers: columns
    by eight, warp, row of eight, columns by two, first or second eight rows, column."""
    flat = tl.load(sums + tl.arange(0, ROWS * COLS))
    parts = flat.reshape([COLS // 8, ROWS // 16, 8, 4, 2, 2])
    return parts.permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, COLS])


@triton.jit
def query_gradients(
    io: BackwardEpilogueIO,
    seqs: Sequences,
    sizes: HopperBackwardSizes,
    b,
    h,
    row0,
    tile: BackwardEpilogueTile,
):
    """Stores dq of BLOCK_M rows of a query head. The sums are two shares: halves of 128 rows, or
    parts of the columns of 64 rows, each a power of two wide."""
    D: tl.constexpr = tile.D
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_D: tl.constexpr = tile.BLOCK_D
    token, len_q, stored_q = sequence(b, seqs.cu_q, seqs.used_q, None, seqs.seqlen_q)
    if row0 >= stored_q:
        return
    accum_row = h * sizes.accum_rows + accum_begin(b, seqs.cu_q, seqs.seqlen_q, BLOCK_M) + row0
    sums = io.dq_accum + accum_row * BLOCK_D
    dq = row_base(io.dq, b, h, token)
    scale = sizes.scale * p_descale(io.dq.ptr.dtype.element_ty)
    FIRST: tl.constexpr = share_columns(BLOCK_D, BLOCK_M, 0)
    for share in tl.static_range(2):
        dq_MD = load_share(
            sums + share * ROWS * FIRST, ROWS, share_columns(BLOCK_D, BLOCK_M, share)
        )
        row = row0 + (share * ROWS if BLOCK_M > ROWS else 0)
        col = 0 if BLOCK_M > ROWS else share * FIRST
        used_M = row + tl.arange(0, ROWS) < len_q
        dq_MD = tl.where(used_M[:, None], dq_MD * scale, 0.0)
        store_rows(dq + col, dq_MD, io.dq.stride_n, row, stored_q, D - col)


@triton.jit
def sum_of_splits(partial, splits, stride, COLS: tl.constexpr):
    """One gradient of 64 keys, with splits added in their order."""
    x_NC = load_share(partial, ROWS, COLS)
    for split in range(1, splits):
        x_NC += load_share(partial + split * stride, ROWS, COLS)
    return x_NC


@triton.jit
def store_sums(
    partial, splits, stride, x, row0, len_k, stored_k, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Stores one gradient of 64 keys. x: (address of the rows of their KV head, stride of a
    row)."""
    used_N = (row0 + tl.arange(0, ROWS) < len_k)[:, None]
    FIRST: tl.constexpr = sum_columns(BLOCK_D, 0)
    for piece in tl.static_range(sum_count(BLOCK_D)):
        place = partial + piece * ROWS * FIRST
        sums = sum_of_splits(place, splits, stride, sum_columns(BLOCK_D, piece))
        sums = tl.where(used_N, sums, 0.0)
        base, stride_n = x
        store_rows(base + piece * FIRST, sums, stride_n, row0, stored_k, D - piece * FIRST)


@triton.jit
def key_gradients(
    io: BackwardEpilogueIO,
    seqs: Sequences,
    sizes: HopperBackwardSizes,
    b,
    h,
    row0,
    splits,
    partial_rows,
    tile: BackwardEpilogueTile,
):
    """Stores dk and dv of 64 keys of a KV head."""
    COLUMNS: tl.constexpr = tile.BLOCK_D + tile.BLOCK_E
    row = h * partial_rows + accum_begin(b, seqs.cu_k, seqs.seqlen_k, tile.BLOCK_N) + row0
    partial = io.partials + row * COLUMNS
    stride = wide(sizes.heads_k) * partial_rows * COLUMNS
    store_keys(io, seqs, sizes, b, h, row0, partial, splits, stride, tile)


@triton.jit
def store_keys(
    io: BackwardEpilogueIO,
    seqs: Sequences,
    sizes: HopperBackwardSizes,
    b,
    h,
    row0,
    partial,
    splits,
    stride,
    tile: BackwardEpilogueTile,
):
    """Adds up the splits of dv and dk of 64 keys, the first of which are at `partial`, and stores
    them."""
    token, len_k, stored_k = sequence(b, seqs.cu_k, seqs.used_k, seqs.leftpad_k, seqs.seqlen_k)
    if row0 >= stored_k:
        return
    dv = row_base(io.dv, b, h, token), io.dv.stride_n
    dk = row_base(io.dk, b, h, token), io.dk.stride_n
    store_sums(partial, splits, stride, dv, row0, len_k, stored_k, tile.E, tile.BLOCK_E)
    partial += ROWS * tile.BLOCK_E
    store_sums(partial, splits, stride, dk, row0, len_k, stored_k, tile.D, tile.BLOCK_D)


@triton.jit
def keys_of_tail(tail: BackwardTail, box, BOXES: tl.constexpr):
    """(KV head of all sequences, first row) of 64 keys, of number `box` among those of the split
    work tiles. `hopper.sm90.tile_scheduler.l2_swizzle` is the same in the main kernel."""
    index = tail.whole + box // BOXES
    per_group = tail.l2_heads * tail.key_blocks
    group = tl.minimum(index // per_group, tail.l2_groups)
    place = index - group * per_group
    first = group * tail.l2_heads
    width = tl.where(group < tail.l2_groups, tail.l2_heads, tail.heads - first)
    block = place // width
    return first + place - block * width, (block * BOXES + box % BOXES) * ROWS


@triton.jit
def tail_gradients(
    io: BackwardEpilogueIO,
    seqs: Sequences,
    sizes: HopperBackwardSizes,
    box,
    splits,
    partial_rows,
    tail: BackwardTail,
    tile: BackwardEpilogueTile,
):
    """Stores dk and dv of 64 keys of a split work tile, where only the last ones are split."""
    head, row0 = keys_of_tail(tail, box, tile.BLOCK_N // ROWS)
    b = wide(head // sizes.heads_k)
    h = wide(head % sizes.heads_k)
    COLUMNS: tl.constexpr = tile.BLOCK_D + tile.BLOCK_E
    partial = io.partials + wide(box) * ROWS * COLUMNS
    stride = wide(partial_rows) * COLUMNS
    store_keys(io, seqs, sizes, b, h, row0, partial, splits, stride, tile)


@triton.jit
def backward_epilogue(
    io: BackwardEpilogueIO,
    seqs: Sequences,
    sizes: HopperBackwardSizes,
    q_blocks,
    k_blocks,
    splits,
    partial_rows,
    tail: BackwardTail,
    tile: BackwardEpilogueTile,
):
    """Stores dq (B, M, H, D) and, if visits are split, dk (B, N, G, D) and dv (B, N, G, E). Rows
    past the used length become zero.

    The grid has, for each sequence, one program for BLOCK_M rows of a query head, q_blocks of the
    longest sequence; then, with splits, one for 64 keys of a KV head, k_blocks. With a tail,
    programs for 64 keys come behind those of all sequences. Where sequences are pieces of batch
    entries, nothing is split, and q_blocks are those of all sequences.
    """
    # The launch begins early (KernelCall.programmatic). From here on, the sums are in memory.
    cuda.gdc_wait()
    heads = sizes.heads_k * sizes.group
    of_queries = q_blocks * heads
    programs = of_queries
    if io.partials is not None and tail.whole is None:
        programs += k_blocks * sizes.heads_k
    # Programs go from the last sums to the first: the sums that were added last are in the L2
    # cache.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    if tail.whole is not None and number >= tail.programs:
        box = number - tail.programs
        tail_gradients(io, seqs, sizes, box, splits, partial_rows, tail, tile)
        return
    b = wide(number // programs)
    pid = number % programs
    if io.partials is not None and tail.whole is None and pid >= of_queries:
        pid -= of_queries
        h = wide(pid // k_blocks)
        row0 = pid % k_blocks * ROWS
        key_gradients(io, seqs, sizes, b, h, row0, splits, partial_rows, tile)
        return
    h = wide(pid // q_blocks)
    row0 = pid % q_blocks * tile.BLOCK_M
    if sizes.sequences is not None:
        b, row0 = tile_of_sequences(pid % q_blocks, seqs.cu_q, sizes.sequences, tile.BLOCK_M)
        b = wide(b)
    query_gradients(io, seqs, sizes, b, h, row0, tile)
