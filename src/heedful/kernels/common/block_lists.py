"""Lists of a block mask on the device: which tiles a tile of rows visits, and which keys of them
its rows see.

Numbers of a list are bounded here, so that no list makes a kernel read outside of memory: counts by
its width, tiles by the sequence, indices by the pool. Lists are of the longest sequence: tiles past
the end of a shorter one become the first that does not exist, of which nothing is visible. A kernel
visits a tile in steps of its own block size, which divides the tile's side.
"""

import triton
import triton.language as tl

from heedful.kernels.args.shared import BlockLists, Mask

# In place of an index of bits.
WHOLE = tl.constexpr(-1)
# Entries of a list that are looked at together.
CHUNK = tl.constexpr(128)


@triton.jit
def list_of(b, h, row, blocks: BlockLists):
    """Where the list of the tile that holds row (or key) `row` begins."""
    tile = row // blocks.SIDE
    if blocks.tiles is not None:
        tile = tl.minimum(tile, blocks.tiles - 1)
    return blocks.ptr + (b * blocks.stride_b + h * blocks.stride_h + tile * blocks.stride_m)


@triton.jit
def listed(base, blocks: BlockLists):
    """How many tiles of a list are seen whole, and how many in part."""
    whole = tl.minimum(tl.maximum(tl.load(base), 0), blocks.width)
    part = tl.minimum(tl.maximum(tl.load(base + 1), 0), blocks.width - whole)
    return whole, part


@triton.jit
def step_of(base, step, length, blocks: BlockLists, BLOCK: tl.constexpr, IS_MASKED: tl.constexpr):
    """(first position, index of bits) of a step of BLOCK positions of a list. length: positions of
    the sequence, whose last tile has fewer than its side only if IS_MASKED. Positions past them may
    then be given: they are hidden."""
    STEPS: tl.constexpr = blocks.SIDE // BLOCK
    entry = base + 2 + step // STEPS * 2
    last = tl.cdiv(length, blocks.SIDE) if IS_MASKED else length // blocks.SIDE - 1
    tile = tl.maximum(tl.minimum(tl.load(entry), last), 0)
    bits = tl.minimum(tl.load(entry + 1), blocks.pool - 1)
    return tile * blocks.SIDE + step % STEPS * BLOCK, bits


@triton.jit
def bits_visible(bits, rows, cols, blocks: BlockLists):
    """Which keys the bits of a tile show, all if its index is negative. rows and cols broadcast."""
    WORDS: tl.constexpr = blocks.SIDE // 32
    row = rows % blocks.SIDE
    col = cols % blocks.SIDE
    base = blocks.bits + tl.maximum(bits, 0).to(tl.int64) * (blocks.SIDE * WORDS)
    words = tl.load(base + (row * WORDS + col // 32))
    return ((words >> (col % 32)) & 1 != 0) | (bits < 0)


@triton.jit
def entries_of(base, entries, length, last, blocks: BlockLists):
    """(tile, index of bits) of entries of a list. Those behind its end, and tiles that do not
    exist, are tile `last`, the first of these."""
    there = entries < length
    tile = tl.load(base + 2 + 2 * entries, mask=there, other=last)
    bits = tl.load(base + 3 + 2 * entries, mask=there, other=WHOLE)
    bits = tl.maximum(tl.minimum(bits, blocks.pool - 1), WHOLE)
    return tl.maximum(tl.minimum(tile, last), 0), bits


@triton.jit
def by_position(row, col, place, mask: Mask, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(whether some of the BLOCK_M queries from `row` on see some of the BLOCK_N keys from `col` on
    by position, whether all see all of them). row and col broadcast."""
    seq = place.seq
    row = row + col * 0
    col = col + row * 0
    last_row = tl.minimum(row + BLOCK_M, seq.len_q) - 1 + seq.off
    last = tl.minimum(col + BLOCK_N, seq.len_k) - 1
    some = (row < seq.len_q) & (col < seq.len_k)
    every = some & (col + BLOCK_N <= seq.len_k)
    if mask.HAS_RIGHT:
        some &= col <= last_row + mask.right
        every &= last <= row + seq.off + mask.right
    if mask.HAS_LEFT:
        some &= last >= row + seq.off - mask.left
        every &= col >= last_row - mask.left
    return some, every
