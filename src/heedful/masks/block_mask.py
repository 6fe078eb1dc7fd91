"""Masks by tiles of scores, and the lists and bits that kernels read."""

import sys
from collections.abc import Callable
from typing import Any

from heedful.core.base import settings
from heedful.core.base.frozen import dataclass
from heedful.core.base.numbers import truth
from heedful.core.call.block_mask import SIDES
from heedful.masks.arrays import (
    along,
    check_count,
    check_ints,
    int32,
    is_compiling,
    is_torch,
    namespace,
    shape_of,
)

HIDDEN, WHOLE = -2, -1  # in place of the index of a tile's bits
_ARRAYS = ("rows", "keys", "bits", "overflow")
_registered: set[str] = set()


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which keys each query sees, by square tiles of scores: most are seen whole or not at all, and
    bits say it of the others. `of` and `of_lists` make it, of arrays of PyTorch or of JAX. It is a
    registered pytree.

    rows: int32 (batch or 1, heads or 1, tiles of queries, 2 + 2 width): for each tile of queries
        how many tiles of keys it sees whole, how many in part, and (tile, index) of each: those
        seen whole first, with an index of -1. keys: the same by tiles of keys. bits: int32 (tiles
        seen in part, side, side / 32), the least significant bit first; equal tiles share it.
    seqlen_q, seqlen_k: of queries and keys. overflow: bool (), whether more tiles are seen in part
        than the capacity that was given; those beyond it are hidden. None without a capacity.
    scattered: whether neighbours among the tiles of keys are seen by few of the same queries, so
        that kernels had better not take two of their lists at once. It changes no result.
    """

    rows: Any
    keys: Any
    bits: Any
    seqlen_q: int
    seqlen_k: int
    overflow: Any = None
    scattered: bool = False

    def __post_init__(self):
        if not is_compiling():
            _register()

    @property
    def side(self) -> int:
        """Rows and keys of a tile."""
        return self.bits.shape[1]

    @staticmethod
    def of(
        mask: Any,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
        batch: int = 1,
        heads: int = 1,
        side: int = 128,
        capacity: int | None = None,
        like: Any = None,
    ) -> "BlockMask":
        """The block mask of a mask of another kind.

        Args:
            mask: bool (batch or 1, heads or 1, seqlen_q, seqlen_k), True where a query sees a key;
                or a function of ints (b, h, i, j) that returns a bool of arrays like `like`, which
                is mapped over all of them; or a BlockMask of torch.nn.attention.flex_attention,
                whose lists are taken, and whose mask_mod is asked about tiles seen in part alone.
            seqlen_q, seqlen_k, batch, heads: with a function: how many there are of each argument.
                Others have their own.
            side: rows and keys of a tile: 32, 64 or 128. A BlockMask of torch has its own.
            capacity: the most tiles seen in part. Without it the call waits for the device to count
                them. With it nothing waits, and the call may be traced; equal tiles do not share.
            like: with a function: an array on the device that the mask is for.

        Raises:
            TypeError, ValueError: naming the argument; also where tiles seen in part take more than
            a GiB.
        """
        from heedful.masks import of_masks

        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "batch": batch, "heads": heads}
        if of_masks.is_of_torch(mask):
            _refuse("a BlockMask of torch", sizes | {"capacity": capacity, "like": like})
            made = of_masks.of_torch(mask)
            if side not in (128, made.side):
                raise ValueError(f"side must be {made.side}, that of torch's mask, got {side}")
            return made
        _check_side(side)
        if capacity is not None:
            check_count("capacity", capacity, 1)
        if callable(mask):
            for name, value in sizes.items():
                check_count(name, value, int(name in _ONE))
            xp, shape = namespace("like", like), (batch, heads, seqlen_q, seqlen_k)
            source = of_masks.of_function(xp, mask, like)
            return of_masks.evaluated(xp, like, source, shape, side, capacity)
        xp = namespace("mask", mask)
        _refuse("an array", sizes | {"like": like})
        shape = shape_of("mask", mask, "(batch or 1, heads or 1, seqlen_q, seqlen_k)")
        if mask.dtype != (xp.bool if is_torch(xp) else bool):
            raise TypeError(f"mask must be bool, got {mask.dtype}")
        return of_masks.evaluated(xp, mask, of_masks.of_array(mask), shape, side, capacity)

    @staticmethod
    def of_lists(
        counts: Any,
        tiles: Any,
        *,
        seqlen_q: int,
        seqlen_k: int,
        side: int = 128,
        scattered: bool = True,
    ) -> "BlockMask":
        """The block mask in which each tile of queries sees whole tiles of keys. It waits for
        nothing, and may be traced.

        Args:
            counts: ints (batch or 1, heads or 1, tiles of queries): how many tiles of keys.
            tiles: ints (batch or 1, heads or 1, tiles of queries, n): which, in any order. Numbers
                past the count mean nothing. A tile that does not exist shows nothing; on a CPU, and
                under HEEDFUL_CHECK_PAGES, it raises.
            seqlen_q, seqlen_k: of queries and keys.
            side: rows and keys of a tile: 32, 64 or 128.
            scattered: whether each tile of queries has tiles of its own choice, such as its best.
                False where neighbours see almost the same, as in windows: tiles of 64 then have
                faster gradients (`BlockMask`).

        Raises:
            TypeError, ValueError: naming the argument.
        """
        scattered = truth("scattered", scattered)
        xp = namespace("tiles", tiles)
        _check_side(side)
        check_count("seqlen_q", seqlen_q, 0)
        check_count("seqlen_k", seqlen_k, 0)
        check_ints("tiles", tiles)
        check_ints("counts", counts)
        *outer, width = shape_of("tiles", tiles, "(batch or 1, heads or 1, tiles of queries, n)")
        rows, columns = (-(-length // side) for length in (seqlen_q, seqlen_k))
        if outer[2] != rows or tuple(counts.shape) != tuple(outer):
            raise ValueError(
                f"counts and tiles must have {rows} tiles of queries, as {seqlen_q} queries in"
                f" tiles of {side} are, and the same batch and heads, got shapes"
                f" {tuple(counts.shape)} and {tuple(tiles.shape)}"
            )
        used = along(xp, width, tiles) < counts[..., None]
        exists = (tiles >= 0) & (tiles < columns)
        if is_checked(tiles):
            _check_entries(xp, counts, tiles, used & ~exists, width, columns)
        places = xp.where(used & exists, tiles, columns)
        table = put_along(xp, hidden(xp, tiles, (*outer, columns + 1)), places, WHOLE)[
            ..., :columns
        ]
        bits = no_bits(xp, tiles, side)
        return from_table(xp, table, bits, seqlen_q, seqlen_k, scattered=scattered)

    def to_dense(self) -> Any:
        """bool (batch or 1, heads or 1, seqlen_q, seqlen_k): what each query sees."""
        xp = namespace("rows", self.rows)
        side, columns = self.side, self.keys.shape[2]
        width = (self.rows.shape[-1] - 2) // 2
        pairs = self.rows[..., 2:].reshape(*self.rows.shape[:-1], width, 2)
        used = along(xp, pairs.shape[-2], self.rows) < self.rows[..., :2].sum(-1)[..., None]
        places = xp.where(used, pairs[..., 0], columns)
        empty = hidden(xp, self.rows, (*self.rows.shape[:-1], columns + 1))
        table = put_along(xp, empty, places, pairs[..., 1])[..., :columns]
        words = self.bits[xp.where(table > 0, table, 0)]
        words = words[..., None]
        seen = (words >> along(xp, 32, words)) & 1 != 0
        seen = seen.reshape(*table.shape, side, side)
        table = table[..., None, None]
        seen = (seen & (table > HIDDEN)) | (table == WHOLE)
        seen = xp.swapaxes(seen, -3, -2)
        batch, heads, rows, _ = self.rows.shape
        seen = seen.reshape(batch, heads, rows * side, columns * side)
        return seen[..., : self.seqlen_q, : self.seqlen_k]

    def check(self) -> None:
        """ValueError where a capacity was too small. It waits for the device."""
        if self.overflow is not None and bool(self.overflow):
            raise ValueError(
                f"capacity must be at least the tiles that are seen in part, got the"
                f" {self.bits.shape[0]} of this mask"
            )

    def operands(self, seqlen_q: int, seqlen_k: int, words: str) -> dict[str, Any]:
        """The arrays by Operands' names, of a call in which a sequence has at most so many queries
        and keys. ValueError for one of other lengths. words: say where these come from."""
        if (self.seqlen_q, self.seqlen_k) != (seqlen_q, seqlen_k):
            raise ValueError(
                f"block_mask must be of {seqlen_q} queries and {seqlen_k} keys, as {words},"
                f" got one of {self.seqlen_q} and {self.seqlen_k}"
            )
        return {"block_rows": self.rows, "block_keys": self.keys, "block_bits": self.bits}


def block_operands(
    block_mask: Any,
    q: Any,
    k: Any,
    is_plain: Callable[[Any], bool] = lambda array: True,
    *,
    longest: tuple[Any, Any] | None = None,
    block_table: Any = None,
) -> dict[str, Any]:
    """The arrays of a block mask by Operands' names, none for None. is_plain: whether the value of
    an array may be read. longest: max_seqlen_q and max_seqlen_k of a packed call. block_table: of a
    cache. Raises TypeError or ValueError naming block_mask or its capacity."""
    if block_mask is None:
        return {}
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            "block_mask must be a heedful.BlockMask, which BlockMask.of makes of other masks, got"
            f" {type(block_mask).__name__}"
        )
    if not (hasattr(q, "shape") and hasattr(k, "shape")):
        return {}  # Later checks name them.
    overflow = block_mask.overflow
    if overflow is not None and is_plain(overflow) and is_checked(overflow):
        block_mask.check()
    if longest is not None:
        return block_mask.operands(*longest, "max_seqlen_q and max_seqlen_k say")
    seqlen_q, seqlen_k = (x.shape[1] if len(x.shape) > 1 else 0 for x in (q, k))
    if len(getattr(block_table, "shape", ())) == 2:
        return block_mask.operands(
            seqlen_q, seqlen_k * block_table.shape[1], "q and its pages have"
        )
    return block_mask.operands(seqlen_q, seqlen_k, "q and k have")


def _register() -> None:
    """Makes BlockMask a pytree of the frameworks that are loaded."""
    torch, jax = sys.modules.get("torch.utils._pytree"), sys.modules.get("jax.tree_util")
    for name, module in (("torch", torch), ("jax", jax)):
        if module is not None and name not in _registered:
            _registered.add(name)
            more = {"serialized_type_name": "heedful.BlockMask"} if name == "torch" else {}
            module.register_pytree_node(BlockMask, _flatten, _unflatten(name), **more)


def _flatten(mask: BlockMask) -> tuple:
    facts = mask.seqlen_q, mask.seqlen_k, mask.scattered
    return [getattr(mask, name) for name in _ARRAYS], facts


def _unflatten(name: str):
    def from_arrays(arrays, facts) -> BlockMask:
        (rows, keys, bits, overflow), (seqlen_q, seqlen_k, scattered) = arrays, facts
        return BlockMask(rows, keys, bits, seqlen_q, seqlen_k, overflow, scattered)

    if name == "torch":
        return from_arrays
    return lambda facts, arrays: from_arrays(arrays, facts)


# Sizes of 1 by default.
_ONE = "batch", "heads"


def _refuse(kind: str, others: dict[str, Any]) -> None:
    """ValueError for an argument that a mask of this kind would ignore."""
    for name, value in others.items():
        usual = 1 if name in _ONE else None
        if value is not None and (usual is None or value != usual):
            shown = getattr(value, "shape", value)
            raise ValueError(f"{name} must be {usual} with {kind}, got {shown!r:.60}")


def _check_side(side: Any) -> None:
    check_count("side", side, 1)
    if side not in SIDES:
        raise ValueError(f"side must be {', '.join(map(str, SIDES))}, got {side}")


def is_checked(array: Any) -> bool:
    """Whether values of this array are looked at: of torch on a CPU, or under the setting."""
    if is_torch(namespace("block_mask", array)):
        is_read = array.device.type == "cpu" or settings.get("check_pages")
        return is_read and not is_compiling()
    return not isinstance(array, sys.modules["jax"].core.Tracer) and settings.get("check_pages")


def _check_entries(xp: Any, counts: Any, tiles: Any, wrong: Any, width: int, columns: int) -> None:
    beyond = (counts < 0) | (counts > width)
    if bool(beyond.any()):
        place = [int(n) for n in xp.argwhere(beyond)[0]]
        raise ValueError(
            f"counts must be from 0 to {width}, got {int(counts[tuple(place)])} in row {place[2]}"
            f" of batch entry {place[0]}, head {place[1]}"
        )
    if bool(wrong.any()):
        place = [int(n) for n in xp.argwhere(wrong)[0]]
        raise ValueError(
            f"tiles must be from 0 to {columns - 1}, got {int(tiles[tuple(place)])} in entry"
            f" {place[3]} of row {place[2]} of batch entry {place[0]}, head {place[1]}"
        )


def put_along(xp: Any, array: Any, places: Any, values: Any) -> Any:
    """A copy of an array (B, H, M, N) with values at (B, H, M, W) of its last dim."""
    if is_torch(xp):
        values = values if hasattr(values, "shape") else xp.full_like(array[..., :1], values)
        return array.scatter(
            -1, places.long(), xp.broadcast_to(values, places.shape).to(array.dtype)
        )
    b, h, m, _ = xp.indices(places.shape)
    return array.at[b, h, m, places].set(values)


def hidden(xp: Any, sample: Any, shape: tuple[int, ...]) -> Any:
    """A table of tiles that nothing sees."""
    where = {"device": sample.device} if is_torch(xp) else {}
    return xp.full(shape, HIDDEN, dtype=xp.int32, **where)


def no_bits(xp: Any, sample: Any, side: int, count: int = 1) -> Any:
    """Bits of tiles that show nothing. A mask without tiles in part has one, which no list has."""
    where = {"device": sample.device} if is_torch(xp) else {}
    return xp.zeros((count, side, side // 32), dtype=xp.int32, **where)


def from_table(
    xp: Any,
    table: Any,
    bits: Any,
    seqlen_q: int,
    seqlen_k: int,
    waits=False,
    overflow: Any = None,
    scattered: bool = False,
) -> BlockMask:
    """The mask of a table (B, H, tiles of queries, tiles of keys) of indices of bits, HIDDEN or
    WHOLE. waits: whether lists are cut to the longest, and looked at whether they are scattered,
    which waits for the device."""
    keys = xp.swapaxes(table, -1, -2)
    rows, keys = (_lists(xp, lists, waits) for lists in (table, keys))
    scattered = _are_scattered(xp, table) if waits else scattered
    return BlockMask(rows, keys, bits, seqlen_q, seqlen_k, overflow, scattered)


# Unions of two lists of keys over the lists, from which on lists count as scattered: of 0.94 they
# take 0.71 of the time apart (H200, 2026-11-28); others have not been timed.
_SCATTERED = 0.9


def _are_scattered(xp: Any, table: Any) -> bool:
    """Whether the lists of two neighbours among the tiles of keys have little in common."""
    seen = table > HIDDEN
    first, second = seen[..., 0::2], seen[..., 1::2]
    both = (first[..., : second.shape[-1]] & second).sum()
    return bool(seen.sum() - both > _SCATTERED * seen.sum())


def _lists(xp: Any, table: Any, waits: bool) -> Any:
    tiles = table.shape[-1]
    if not tiles:
        shape = (*table.shape[:-1], 4)
        where = {"device": table.device} if is_torch(xp) else {}
        return xp.zeros(shape, dtype=xp.int32, **where)
    place = along(xp, tiles, table)
    kind = xp.where(table == WHOLE, 0, xp.where(table > WHOLE, 1, 2))
    counts = xp.stack([(kind == 0).sum(-1), (kind == 1).sum(-1)], -1)
    used = place < counts.sum(-1)[..., None]
    width = max(1, int(counts.sum(-1).max())) if waits and 0 not in table.shape else tiles
    order = xp.argsort(kind * tiles + place, -1)
    take = xp.take_along_dim if is_torch(xp) else xp.take_along_axis
    index = xp.where(used, take(table, order, -1), WHOLE)
    pairs = xp.stack([xp.where(used, int32(xp, order), 0), index], -1)[..., :width, :]
    pairs = pairs.reshape(*table.shape[:-1], 2 * width)
    return int32(xp, xp.concatenate([int32(xp, counts), int32(xp, pairs)], -1))
