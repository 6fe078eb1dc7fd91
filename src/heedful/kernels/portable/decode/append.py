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
        for row0 in range(new.first, new.stop, params.append.ROWS):
            append_rows(
                row0,
                new.low,
                new.high,
                place.b,
                place.g,
                params.append.io,
                params.seqs.new_k,
                params.cache,
                params.append.rotary,
                params.append.quantization,
                params.tile.HEAD_DIM,
                params.tile.HEAD_DIM_V,
                params.append.ROWS,
                params.append.BLOCK_D,
                params.append.BLOCK_E,
            )
        # CDNA's barrier does not wait for stores. But the waves of a workgroup share one cache,
        # which their stores pass in order (the memory model of gfx942 in LLVM's AMDGPU guide).
        tl.debug_barrier()
