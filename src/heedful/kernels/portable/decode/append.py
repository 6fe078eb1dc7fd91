"""Appends new rows in the portable decode (split_kv/append.py says which): the threads of a program
write them, then wait for each other."""

import triton
import triton.language as tl

from heedful.kernels.portable.cache.update import append_rows
from heedful.kernels.split_kv.append import new_rows


@triton.jit
def append_segment(segment, place, params):
    """Writes the new rows that belong to a segment."""
    new = new_rows(segment, params.append.io.cache_seqlens + place.b, params)
    if new.first < new.stop:
        b, g, count = place.b, place.g, params.seqs.new_k
        for row0 in range(new.first, new.stop, params.append.tile.BLOCK_N):
            append_rows(row0, new.low, new.high, b, g, params.append, count, params.cache)
        # CDNA's barrier does not wait for stores. But the waves of a workgroup share one cache,
        # which their stores pass in order (the memory model of gfx942 in LLVM's AMDGPU guide).
        tl.debug_barrier()
