"""For the Hopper backward: which query tiles see a key tile by their key_ranges.

The kernel is `query_hulls`, launched before the prologue. An entry has the four numbers of an
`MBlockRange`, or all five. Query tiles that see few of the keys between others that see all are one
run: the kernel may visit some in vain. KV heads whose query heads share their ranges share entries.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper_backward import QueryHullIO
from heedful.kernels.args.shared import Mask, Sequences, Shape
from heedful.kernels.common.row_hulls import ROWS, first_entry, row_hulls, sees_all_or_none
from heedful.kernels.common.sequences import place_of, tile_of_sequences

# Query tiles that are looked at together.
CHUNK = tl.constexpr(128)


@triton.jit
def query_hulls(
    io: QueryHullIO,
    seqs: Sequences,
    shape: Shape,
    mask: Mask,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HIDES_ROWS: tl.constexpr,
):
    """Stores the entries. The grid has a program for each key tile of the longest sequence, of each
    sequence and of each KV head that has ranges of its own; or one for each entry, if all heads
    have the same ranges."""
    block = tl.program_id(0) % io.blocks
    bg = tl.program_id(0) // io.blocks
    b = bg // io.heads
    g = bg % io.heads
    col = block * BLOCK_N
    if io.sequences is not None:
        b, col = tile_of_sequences(tl.program_id(0), seqs.cu_k, io.sequences, BLOCK_N)
        block = col // BLOCK_N
        g = b * 0
    place = place_of(b, g, g, seqs, shape, mask, False)
    if seqs.leftpad_k is None:  # noqa: SIM102  (known when compiling, and `and` is not)
        if col >= place.seq.stored_k:
            return
    len_q = place.seq.len_q
    stop = tl.minimum(col + BLOCK_N, place.seq.len_k)
    count = tl.cdiv(len_q, BLOCK_M)
    begin = count
    end = 0
    full_begin = 0
    full_end = count
    whole_end = count
    for r in range(0, io.group):
        at = first_entry(io.of_keys, place.seq, b, g * io.group + r)
        head_begin = count
        head_end = 0
        fulls = 0
        rows_end = 0
        by_rows = 0
        for first in range(0, count, CHUNK):
            tiles = first + tl.arange(0, CHUNK)
            hulls = row_hulls(at, tiles * BLOCK_M, len_q, BLOCK_M // ROWS, mask.RANGES)
            sees = (hulls.begin < stop) & (hulls.end > col)
            sees |= (hulls.later_begin < stop) & (hulls.later_end > col)
            full = (hulls.full_begin <= col) & (hulls.full_end >= col + BLOCK_N)
            full &= tiles < count
            begin = tl.minimum(begin, tl.min(tl.where(sees, tiles, count), 0))
            end = tl.maximum(end, tl.max(tl.where(sees, tiles + 1, 0), 0))
            head_begin = tl.minimum(head_begin, tl.min(tl.where(full, tiles, count), 0))
            head_end = tl.maximum(head_end, tl.max(tl.where(full, tiles + 1, 0), 0))
            fulls += tl.sum(full.to(tl.int32), 0)
            if HIDES_ROWS:
                known = sees_all_or_none(at, tiles * BLOCK_M, len_q, col, BLOCK_M // ROWS, BLOCK_N)
                known &= sees & (tiles >= head_begin) & (tiles < count)
                rows_end = tl.maximum(rows_end, tl.max(tl.where(known, tiles + 1, 0), 0))
                by_rows += tl.sum(known.to(tl.int32), 0)
        # Tiles that need no mask are one run, or none are known.
        if head_end - head_begin != fulls:
            head_end = 0
        # Those behind it of which some rows see all keys, and the others none, are of the run.
        if (rows_end < head_end) | (rows_end - head_begin != by_rows) | (head_end == 0):
            rows_end = head_end
        full_begin = tl.maximum(full_begin, head_begin)
        whole_end = tl.minimum(whole_end, head_end)
        full_end = tl.minimum(full_end, rows_end)
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    whole_end = tl.minimum(tl.maximum(whole_end, full_begin), full_end)
    entry = place.seq.token_k // BLOCK_N + b
    if seqs.cu_k is None:
        entry = tl.cast(b, tl.int64) * io.blocks
    entry += tl.cast(g, tl.int64) * io.entries + block
    at = io.query_hulls + entry * (5 if HIDES_ROWS else 4)
    tl.store(at, begin)
    tl.store(at + 1, full_begin)
    tl.store(at + 2, full_end)
    tl.store(at + 3, end)
    if HIDES_ROWS:
        tl.store(at + 4, whole_end)
