"""New rows of a decode: whoever reads them writes them first.

A program appends those new rows of a sequence that are among the keys of its piece, has all its
threads wait, and reads them with the others. So none waits for another program. Row tiles of a head
each write what they read: the same values. Rows that no query of a window sees are written, too, by
the piece that jumps over them. Rows ahead of a sequence's first, of a length below its padding, are
not: they are nobody's.
"""

import triton
import triton.language as tl

from heedful.kernels.args.decode import DecodeAppend, DecodeTile
from heedful.kernels.args.shared import KVLayout, Sequences
from heedful.kernels.portable.cache.update import append_rows


@triton.jit
def rows_of(piece, span, place, tile: DecodeTile):
    """Rows [low, high) of a sequence that are a piece's: its keys, and those that no piece visits
    and that it jumps over. Each row of storage is some piece's of a unit."""
    low = piece.start
    last = piece.stop - 1
    # Visits jump from the first keys to the window. What is between is of the piece that begins
    # ahead of the jump and goes on behind it, or begins at it.
    low = tl.where(low <= span.first_end, low, low - span.first_end + span.begin)
    last = tl.where(last < span.first_end, last, last - span.first_end + span.begin)
    high = (last + 1) * tile.BLOCK_N
    high = tl.where(piece.stop >= span.visits, place.seq.stored_k, high)
    return low * tile.BLOCK_N, high


@triton.jit
def append_piece(
    piece,
    span,
    place,
    sequences: Sequences,
    cache: KVLayout,
    append: DecodeAppend,
    tile: DecodeTile,
):
    """Writes the new rows that are a piece's."""
    low, high = rows_of(piece, span, place, tile)
    low += place.seq.token_k
    high = tl.minimum(high + place.seq.token_k, sequences.seqlen_k)
    start = tl.load(append.io.cache_seqlens + place.b)
    first = tl.maximum(low - start, 0)
    stop = tl.minimum(high - start, sequences.new_k)
    if first < stop:
        for row0 in range(first, stop, append.ROWS):
            append_rows(
                row0,
                low,
                high,
                place.b,
                place.g,
                append.io,
                sequences.new_k,
                cache,
                append.rotary,
                append.quantization,
                tile.HEAD_DIM,
                tile.HEAD_DIM_V,
                append.ROWS,
                append.BLOCK_D,
                append.BLOCK_E,
            )
        # CDNA's does not wait for stores, but a workgroup's waves share the cache that theirs go
        # through, in order (the memory model of gfx942 in LLVM's AMDGPU guide).
        tl.debug_barrier()
