"""Block masks of functions, of bool arrays and of torch's block masks.

A mask is looked at in parts of some tiles of rows, so that no array of queries x keys is made.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from heedful.masks.arrays import int32, is_torch, positions
from heedful.masks.block_mask import HIDDEN, WHOLE, BlockMask, from_table, no_bits, put_along

# Scores of a part, and the most bytes of bits.
_PART = 1 << 24
_MOST_BYTES = 1 << 30
# Gives a part: bool (batch, heads, rows, keys) of ranges of batch and heads, and of rows.
Source = Callable[[range, range, Any, Any], Any]


def of_array(mask: Any) -> Source:
    """The parts of a bool array (batch, heads, seqlen_q, seqlen_k)."""

    def part(batch: range, heads: range, rows: Any, keys: Any) -> Any:
        part_of = mask[batch.start : batch.stop, heads.start : heads.stop]
        return part_of[:, :, rows][..., keys]

    return part


def of_function(xp: Any, mask: Callable, sample: Any) -> Source:
    """The parts of a function of (b, h, i, j)."""
    vmap = xp.vmap if is_torch(xp) else sys.modules["jax"].vmap
    mapped = _checked(xp, mask)
    for dim in (3, 2, 1, 0):
        mapped = vmap(mapped, tuple(0 if dim == d else None for d in range(4)))

    def part(batch: range, heads: range, rows: Any, keys: Any) -> Any:
        b, h = (_wide(xp, positions(xp, r.stop, sample)[r.start :]) for r in (batch, heads))
        return mapped(b, h, rows, keys)

    return part


def _wide(xp: Any, place: Any) -> Any:
    """Positions as a framework's functions index by them."""
    return place.long() if is_torch(xp) else place


def _checked(xp: Any, mask: Callable) -> Callable:
    """The function, which raises TypeError unless it returns a bool array."""

    def checked(b, h, i, j):
        seen = mask(b, h, i, j)
        if getattr(seen, "dtype", None) != (xp.bool if is_torch(xp) else bool):
            kind = getattr(seen, "dtype", type(seen).__name__)
            raise TypeError(f"mask must return a bool array of (b, h, i, j), got {kind}")
        return seen

    return checked


class _Tiles:
    """The tiles of the parts of a mask: how they are seen, and their bits."""

    def __init__(self, xp: Any, sample: Any, side: int, capacity: int | None):
        self.xp, self.sample, self.side, self.capacity = xp, sample, side, capacity
        self.count: Any = 0
        self.parts: list[Any] = []
        self.pool = None
        if capacity is not None:
            self.pool = no_bits(xp, sample, side, capacity + 1)

    def table(self, seen: Any, exists: Any) -> Any:
        """Indices (..,) of tiles (.., side, side). exists: which of their scores there are."""
        xp = self.xp
        flat = (*seen.shape[:-2], -1)
        seen, exists = (
            xp.broadcast_tensors(seen, exists)
            if is_torch(xp)
            else (xp.broadcast_arrays(seen, exists))
        )
        some, whole = (seen & exists).reshape(flat).any(-1), (seen | ~exists).reshape(flat).all(-1)
        part = some & ~whole
        words = _words(xp, seen & exists)
        number = (int32(xp, xp.cumsum(part.reshape(-1), 0)) - 1).reshape(part.shape)
        if self.pool is None:
            number, count = self._shared(words[part], number)
            number = number + self.count
            self.count += count
            self._check_size()
        else:
            number = number + self.count
            self.count = self.count + part.sum()
            part = part & (number < self.capacity)
            places = xp.where(part, number, self.capacity).reshape(-1)
            words = words.reshape(-1, *self.pool.shape[1:])
            if is_torch(xp):
                self.pool = self.pool.index_put((places.long(),), words)
            else:
                self.pool = self.pool.at[places].set(words)
        return xp.where(xp.logical_and(whole, some), WHOLE, xp.where(part, number, HIDDEN))

    def _shared(self, words: Any, number: Any) -> tuple[Any, int]:
        """(numbers after equal tiles have become one, how many there are)."""
        if not words.shape[0]:
            return number, 0
        distinct, place = _unique(self.xp, words)
        self.parts.append(distinct)
        clipped = self.xp.where(number < 0, 0, number)
        return place[clipped], distinct.shape[0]

    def _check_size(self) -> None:
        size = self.count * self.side * self.side // 8
        if size > _MOST_BYTES:
            raise ValueError(
                f"mask must have at most {_MOST_BYTES} bytes of tiles that are seen in part, got"
                f" {size} or more (a larger side, or a bias of bool)"
            )

    def finished(self, table: Any, seqlen_q: int, seqlen_k: int) -> BlockMask:
        """The mask of a table of all tiles."""
        xp = self.xp
        table = int32(xp, table)
        if self.pool is not None:
            overflow = self.count > xp.zeros_like(self.pool[0, 0, 0]) + self.capacity
            bits = self.pool[: self.capacity]
            return from_table(xp, table, bits, seqlen_q, seqlen_k, overflow=overflow)
        bits = no_bits(xp, self.sample, self.side)
        if self.parts:
            bits, place = _unique(xp, xp.concatenate(self.parts))
            table = xp.where(table > WHOLE, place[xp.where(table < 0, 0, table)], table)
        return from_table(xp, int32(xp, table), bits, seqlen_q, seqlen_k, waits=True)


def _words(xp: Any, seen: Any) -> Any:
    """bool (.., side, side) as int32 words (.., side, side / 32)."""
    place = positions(xp, 31, seen)
    weights = xp.concatenate([xp.ones_like(place) << place, xp.zeros_like(place[:1]) + -(2**31)])
    parted = int32(xp, seen.reshape(*seen.shape[:-1], -1, 32))
    weights = weights.reshape(*(1,) * (len(parted.shape) - 1), 32)
    return int32(xp, (parted * weights).sum(-1, dtype=xp.int32))


def _unique(xp: Any, words: Any) -> tuple[Any, Any]:
    """(the different tiles of (n, side, words), int32 (n,): which of them each is)."""
    flat = words.reshape(words.shape[0], -1)
    if is_torch(xp):
        distinct, place = xp.unique(flat, dim=0, return_inverse=True)
        return distinct.reshape(-1, *words.shape[1:]), int32(xp, place)
    distinct, place = np.unique(np.asarray(flat), axis=0, return_inverse=True)
    return xp.asarray(distinct).reshape(-1, *words.shape[1:]), int32(
        xp, xp.asarray(place.reshape(-1))
    )


def evaluated(
    xp: Any, sample: Any, source: Source, sizes: tuple, side: int, capacity: int | None
) -> BlockMask:
    """The mask of a source of (batch, heads, seqlen_q, seqlen_k), asked for part by part."""
    batch, heads, seqlen_q, seqlen_k = sizes
    rows, columns = (-(-length // side) for length in (seqlen_q, seqlen_k))
    tiles = _Tiles(xp, sample, side, capacity)
    if not (batch and heads and rows and columns):
        where = {"device": sample.device} if is_torch(xp) else {}
        empty = xp.zeros((batch, heads, rows, columns), dtype=xp.int32, **where)
        return tiles.finished(empty, seqlen_q, seqlen_k)
    j = _wide(xp, positions(xp, columns * side, sample))
    at_once = max(1, _PART // (side * columns * side))
    of_heads = min(heads, at_once)
    of_rows = min(rows, max(1, at_once // of_heads))
    by_batch = []
    for b in range(batch):
        by_head = []
        for h in range(0, heads, of_heads):
            some_heads = range(h, min(h + of_heads, heads))
            by_row = []
            for r in range(0, rows, of_rows):
                stop = min(r + of_rows, rows) * side
                i = _wide(xp, positions(xp, stop, sample)[r * side :])
                last = xp.clip(i, 0, seqlen_q - 1), xp.clip(j, 0, seqlen_k - 1)
                seen = source(range(b, b + 1), some_heads, *last)
                exists = (i < seqlen_q)[:, None] & (j < seqlen_k)[None]
                parted = (_tiled(xp, seen, side), _tiled(xp, exists[None, None], side))
                by_row.append(tiles.table(*parted))
            by_head.append(xp.concatenate(by_row, 2))
        by_batch.append(xp.concatenate(by_head, 1))
    return tiles.finished(xp.concatenate(by_batch, 0), seqlen_q, seqlen_k)


def _tiled(xp: Any, seen: Any, side: int) -> Any:
    """(.., M, N) as tiles (.., M / side, N / side, side, side)."""
    *outer, m, n = seen.shape
    return xp.swapaxes(seen.reshape(*outer, m // side, side, n // side, side), -3, -2)


def is_of_torch(mask: Any) -> bool:
    """Whether this is a BlockMask of torch's FlexAttention."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(mask, flex.BlockMask)


def of_torch(mask: Any) -> BlockMask:
    """The block mask of torch's. It waits for the device. Raises ValueError for other tiles than
    those of multiples of 32."""
    import torch

    sizes, (seqlen_q, seqlen_k) = mask.BLOCK_SIZE, mask.seq_lengths
    side = next((n for n in (128, 64, 32) if all(size % n == 0 for size in sizes)), 0)
    if not side:
        raise ValueError(f"mask must have a BLOCK_SIZE of multiples of 32, got {tuple(sizes)}")
    rows, columns = (-(-length // side) for length in (seqlen_q, seqlen_k))
    part = _listed(mask.kv_num_blocks, mask.kv_indices, seqlen_k, sizes[1])
    whole = torch.zeros_like(part)
    if mask.full_kv_num_blocks is not None:
        whole = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, seqlen_k, sizes[1])
    # Tiles of torch's that are larger are cut.
    row, column = (
        positions(torch, count, part).long() * side // size
        for count, size in zip((rows, columns), sizes, strict=True)
    )
    part, whole = (seen[:, :, row][..., column] for seen in (part, whole))
    table = torch.where(whole, WHOLE, HIDDEN).to(torch.int32)
    sample = mask.kv_indices
    tiles = _Tiles(torch, sample, side, None)
    mapped = _checked(torch, mask.mask_mod)
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        mapped = torch.vmap(mapped, dims)
    places = (part & ~whole).nonzero()
    inner = positions(torch, side, sample).long()
    for some in places.split(max(1, _PART // side**2)) if len(places) else ():
        b, h, m, n = some.unbind(-1)
        i, j = m[:, None] * side + inner, n[:, None] * side + inner
        seen = mapped(b, h, i.clamp(max=seqlen_q - 1), j.clamp(max=seqlen_k - 1))
        exists = (i < seqlen_q)[:, :, None] & (j < seqlen_k)[:, None]
        table[b, h, m, n] = int32(torch, tiles.table(seen, exists))
    return tiles.finished(table, seqlen_q, seqlen_k)


def _listed(counts: Any, tiles: Any, seqlen_k: int, size: int) -> Any:
    """bool (batch, heads, tiles of queries, tiles of keys): which tiles are in lists."""
    import torch

    columns = -(-seqlen_k // size)
    used = positions(torch, tiles.shape[-1], tiles) < counts[..., None]
    exists = (tiles >= 0) & (tiles < columns)
    hidden = torch.zeros((*tiles.shape[:-1], columns + 1), dtype=torch.bool, device=tiles.device)
    return put_along(torch, hidden, torch.where(used & exists, tiles, columns), True)[..., :columns]
