"""The scores of a tile that a block mask shows, on a CPU.

B batch rows, G kv heads, R query heads of each, as in blocks.py; dims that the mask repeats have
size 1. M query rows and N keys of the tile.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from heedful.cpu.blocks import Block

_HIDDEN = -2  # in place of the index of a tile that no list has


def is_listed(block: "Block", rows: range, cols: range) -> bool:
    """Whether lists have any tile of queries `rows` and keys `cols`."""
    return bool((_indices(block, rows, cols) > _HIDDEN).any())


def shown(block: "Block", rows: range, cols: range) -> torch.Tensor:
    """Which keys `cols` queries `rows` see: bool (B, G, R, M, N)."""
    bits = block.x.block_bits
    assert bits is not None
    side = bits.shape[1]
    indices = _indices(block, rows, cols)[..., None, None]
    words = bits[indices[..., 0, 0].clamp(min=0)]
    seen = words[..., None] >> torch.arange(32, dtype=torch.int32, device="cpu") & 1
    seen = (seen.flatten(-2) != 0) & (indices > _HIDDEN) | (indices == -1)
    seen = seen.transpose(-3, -2).flatten(-4, -3).flatten(-2)
    row, col = rows.start % side, cols.start % side
    return seen[..., row : row + len(rows), col : col + len(cols)]


def _indices(block: "Block", rows: range, cols: range) -> torch.Tensor:
    """The index of every tile that `rows` and `cols` touch, (B, G, R, tiles, tiles): -1 if it is
    seen whole."""
    lists, bits = block.x.block_rows, block.x.block_bits
    assert lists is not None and bits is not None
    side, tiles = bits.shape[1], block.x.block_keys.shape[2]
    b, h = block.batches, block.query_heads
    repeats = lists.stride(0) == 0, lists.stride(1) == 0
    rows_of = lists[:1] if repeats[0] else lists[b.start : b.stop]
    rows_of = (
        rows_of[:, :1, None]
        if repeats[1]
        else rows_of[:, h.start : h.stop].unflatten(1, (len(block.kv_heads), -1))
    )
    rows_of = rows_of[..., rows.start // side : -(-rows.stop // side), :]
    tile, index = rows_of[..., 2:].unflatten(-1, (-1, 2)).unbind(-1)
    used = torch.arange(tile.shape[-1], device="cpu") < rows_of[..., :2].sum(-1, keepdim=True)
    table = torch.full((*tile.shape[:-1], tiles + 1), _HIDDEN, dtype=torch.int32, device="cpu")
    table.scatter_(-1, tile.masked_fill(~used, tiles).long(), index)
    return table[..., cols.start // side : -(-cols.stop // side)]
