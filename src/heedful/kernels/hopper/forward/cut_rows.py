"""For the Hopper kernels: rows with key_ranges as packed sequences, cut where rows part.

Rows part at a row if no row from there on sees a key before it; under a causal mask earlier rows
see none behind it. Such are the first rows of documents, and those behind padding. Queries and keys
may then be cut there: work tiles begin where documents do. At most one of `CUT_ROWS` rows is cut,
the first at which a run of rows with another first key begins. So a sequence may hold several
documents.

The kernels are `part_rows`, which finds rows that may be cut, `cut_rows`, which stores where
sequences begin, and `cut_hulls`, which does what forward/key_hulls.py does and stores ranges that
count from their sequence's first key. Shapes: B blocks of rows, M rows.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper import CutHullIO, CutIO
from heedful.kernels.args.shared import Mask
from heedful.kernels.common.row_hulls import NOWHERE, NUMBERS, ROWS
from heedful.kernels.common.row_ranges import Hull, cut_range, hull_of
from heedful.kernels.common.rows import wide
from heedful.kernels.common.sequences import Place, Seqlens, tile_of_sequences
from heedful.kernels.hopper.forward.key_hulls import store_hulls


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def first_keys(base, rows_M, exists_M, io: CutIO):
    """The first key that each row sees under a causal mask, NOWHERE if none."""
    pointers = base + wide(rows_M) * io.ranges.stride_m
    begin_M = tl.maximum(tl.load(pointers, mask=exists_M, other=0), 0)
    end_M = tl.minimum(tl.load(pointers + 1, mask=exists_M, other=0), rows_M + 1)
    return tl.where(begin_M < end_M, begin_M, NOWHERE)


@triton.jit
def part_rows(io: CutIO, CUT_ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Stores two numbers for each CUT_ROWS rows: the first one that may be cut as far as these rows
    know, NOWHERE if none, and the least key that any of them sees. If that row may not be cut since
    later rows see a key before it, nor may those behind it.

    The grid has a program for so many BLOCKS of each batch entry."""
    chunks = tl.cdiv(io.blocks, BLOCKS)
    b = tl.program_id(0) // chunks
    first = tl.program_id(0) % chunks * BLOCKS
    base = io.ranges.ptr + wide(b) * io.ranges.stride_b
    block_B = first + tl.arange(0, BLOCKS)
    rows_BM = block_B[:, None] * CUT_ROWS + tl.arange(0, CUT_ROWS)[None, :]
    exists_BM = rows_BM < io.rows
    begin_BM = first_keys(base, rows_BM, exists_BM, io)
    before_BM = first_keys(base, rows_BM - 1, exists_BM & (rows_BM > 0), io)
    least_BM = tl.associative_scan(begin_BM, 1, smaller, reverse=True)
    is_cut_BM = exists_BM & (least_BM >= rows_BM) & ((begin_BM != before_BM) | (rows_BM == 0))
    cut_B = tl.min(tl.where(is_cut_BM, rows_BM, NOWHERE), 1)
    at_B = io.parts + 2 * (b * io.blocks + block_B)
    tl.store(at_B, cut_B, mask=block_B < io.blocks)
    tl.store(at_B + 1, tl.min(begin_BM, 1), mask=block_B < io.blocks)


@triton.jit
def cut_rows(io: CutIO, BLOCKS: tl.constexpr):
    """Stores the first tokens of sequences, one for each block of each batch entry, and the count
    of all tokens: a block in which no row is cut has an empty sequence.

    The grid has a program for each batch entry, which goes from the last block to the first, so
    many at a time."""
    b = tl.program_id(0)
    chunks = tl.cdiv(io.blocks, BLOCKS)
    token = b * io.rows
    later = NOWHERE
    next_cut = token + io.rows
    for i in range(0, chunks):
        block_B = (chunks - 1 - i) * BLOCKS + tl.arange(0, BLOCKS)
        exists_B = block_B < io.blocks
        at_B = io.parts + 2 * (b * io.blocks + block_B)
        cut_B = tl.load(at_B, mask=exists_B, other=NOWHERE)
        least_B = tl.load(at_B + 3, mask=block_B + 1 < io.blocks, other=NOWHERE)
        # The least key that rows of later blocks see.
        least_B = tl.minimum(tl.associative_scan(least_B, 0, smaller, reverse=True), later)
        cut_B = tl.where(least_B >= cut_B, token + cut_B, NOWHERE)
        cut_B = tl.minimum(tl.associative_scan(cut_B, 0, smaller, reverse=True), next_cut)
        tl.store(io.tokens + b * io.blocks + block_B, cut_B, mask=exists_B)
        later = tl.min(least_B, 0)
        next_cut = tl.min(cut_B, 0)
    if b == tl.num_programs(0) - 1:
        tl.store(io.tokens + (b + 1) * io.blocks, token + io.rows)


@triton.jit
def cut_hulls(io: CutHullIO, mask: Mask):
    """Stores the entries and ranges. mask: of the call, whose ranges count from the first key of
    their batch entry. The grid has a program for each entry."""
    entry = tl.program_id(0)
    b, row = tile_of_sequences(entry, io.tokens, io.sequences, ROWS)
    start = tl.load(io.tokens + b)
    length = tl.load(io.tokens + b + 1) - start
    if row >= length:
        return
    of_batch = start // io.rows
    first = start - of_batch * io.rows
    rows_M = row + tl.arange(0, ROWS)
    exists_M = rows_M < length
    pointers = mask.ranges.ptr + wide(of_batch) * mask.ranges.stride_b
    pointers += wide(first + rows_M) * mask.ranges.stride_m
    begin_M = tl.maximum(tl.load(pointers, mask=exists_M, other=0), first) - first
    end_M = tl.minimum(tl.load(pointers + 1, mask=exists_M, other=0), first + length) - first
    stored = io.ranges + 2 * wide(start + rows_M)
    tl.store(stored, begin_M, mask=exists_M)
    tl.store(stored + 1, end_M, mask=exists_M)
    zero = row * 0
    seq = Seqlens(
        token_q=start,
        len_q=length,
        stored_q=length,
        token_k=start,
        len_k=length,
        stored_k=length,
        off=zero,
    )
    place = Place(wide(b), wide(zero), wide(zero), seq)
    begin_M, end_M = cut_range(begin_M, end_M, rows_M, place, mask)
    hull = hull_of(begin_M, end_M, rows_M, place, mask, 1)
    store_hulls(io.key_hulls + wide(entry) * NUMBERS, hull, Hull(0, 0, 0, 0))
