"""Lists of a block mask on the device: which tiles a tile of rows visits, and which keys of them
its rows see.

Numbers of a list are bounded here, so that no list makes a kernel read outside of memory: counts by
its width, tiles by the sequence, indices by the pool. Lists are of the longest sequence: tiles past
the end of a shorter one become the first that does not exist, of which nothing is visible. A kernel
visits a tile in steps of its own block size, which divides the tile's side.
"""

import triton
import triton.language as tl

from heedful.kernels.args.shared import BlockLists


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
