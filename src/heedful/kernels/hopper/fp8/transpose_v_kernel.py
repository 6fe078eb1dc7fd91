"""Transposes V for fp8 matrix products, with keys innermost.

fp8 WGMMA takes only K-major operands from shared memory, and V is stored (key, dim). The kernel
`transpose_v` transposes each KV head once, in device memory, before the attention kernel. Its grid
has one program for each block of positions of each head.

N keys, E v dim, W words of four bytes.
"""

import triton
import triton.language as tl

from heedful.kernels.args.hopper import TransposeIO, TransposeSizes
from heedful.kernels.common.sequences import within


@triton.jit
def transposed_word(row0, row1, row2, row3, BYTE: tl.constexpr):
    """Byte BYTE of four words, as one word."""
    shift: tl.constexpr = 8 * BYTE
    word = (row0 >> shift) & 0xFF
    word |= ((row1 >> shift) & 0xFF) << 8
    word |= ((row2 >> shift) & 0xFF) << 16
    return word | (row3 >> shift) << 24


@triton.jit
def sequence_at(cu_k, block, batch, total, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """The packed sequence that has this block of positions: the last one that begins at or before
    it, or the first one."""
    ahead = 0
    for first in range(0, batch, BLOCK_B):
        other_B = first + tl.arange(0, BLOCK_B)
        starts_B = within(tl.load(cu_k + other_B, mask=other_B < batch, other=0), 0, total)
        begins_B = starts_B // BLOCK_N + other_B
        ahead += tl.sum(((begins_B <= block) & (other_B < batch)).to(tl.int32), 0)
    return tl.maximum(ahead - 1, 0)


@triton.jit
def transpose_v(
    io: TransposeIO,
    sizes: TransposeSizes,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """v (B, N, G, E), or packed (T, G, E), -> out (B, G, E, padded_k), or (G, E, padded_k).

    In every 16 keys, position 4t + 2h + b takes key 8h + 2t + b: the order in which a lane of the
    attention kernel holds probabilities (see softmax.py). Positions past a sequence are zeros up to
    a multiple of BLOCK_N. A packed sequence b that begins at token c begins at position (c //
    BLOCK_N + b) * BLOCK_N. tile_counter: the attention kernel's, set to 0 here (see
    sm90/tile_scheduler.py). seqlen_k: N, or T.
    """
    if io.tile_counter is not None:  # noqa: SIM102  (known when compiling, and `and` is not)
        if tl.program_id(0) == 0:
            tl.store(io.tile_counter, 0)
    block = tl.program_id(0) % sizes.blocks
    head = tl.program_id(0) // sizes.blocks
    b = head // sizes.heads_k
    head -= b * sizes.heads_k
    length, base = sizes.seqlen_k, 0
    v_ptr = io.v.ptr + head.to(tl.int64) * io.v.stride_h
    out_ptr = io.v_t
    if io.cu_k is not None:
        b = sequence_at(io.cu_k, block, sizes.batch, sizes.seqlen_k, BLOCK_N, BLOCK_B)
        start = within(tl.load(io.cu_k + b), 0, sizes.seqlen_k)
        length = within(tl.load(io.cu_k + b + 1), start, sizes.seqlen_k) - start
        base = (start // BLOCK_N + b) * BLOCK_N
        block -= base // BLOCK_N
        v_ptr += start.to(tl.int64) * io.v.stride_n
        out_ptr += head.to(tl.int64) * sizes.dim_v * sizes.padded_k
    else:
        v_ptr += b.to(tl.int64) * io.v.stride_b
        out_ptr += (b * sizes.heads_k + head).to(tl.int64) * sizes.dim_v * sizes.padded_k
    first = block * BLOCK_N
    # A block before the first sequence has no keys either.
    if (first < 0) | (first >= length):
        return
    words_N = tl.arange(0, BLOCK_N // 4)
    words_E = tl.arange(0, BLOCK_E // 4)
    key_N = first + words_N // 4 * 16 + words_N % 4 * 2
    inside_E = words_E < sizes.dim_v // 4
    v_words = v_ptr.to(tl.pointer_type(tl.uint32))
    rows = ()
    for i in tl.static_range(4):
        row_N = key_N + (i & 1) + (i >> 1) * 8
        at_NE = row_N[:, None].to(tl.int64) * (io.v.stride_n // 4) + words_E[None, :]
        inside_NE = (row_N < length)[:, None] & inside_E[None, :]
        rows += (tl.load(v_words + at_NE, mask=inside_NE, other=0),)
    out_words = out_ptr.to(tl.pointer_type(tl.uint32))
    column_N = (base + first) // 4 + words_N
    for byte in tl.static_range(4):
        dim_E = words_E * 4 + byte
        word_EN = tl.trans(transposed_word(rows[0], rows[1], rows[2], rows[3], byte))
        at_EN = dim_E[:, None].to(tl.int64) * (sizes.padded_k // 4) + column_N[None, :]
        tl.store(out_words + at_EN, word_EN, mask=inside_E[:, None])
