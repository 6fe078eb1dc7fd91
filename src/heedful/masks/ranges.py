"""Masks in which each row sees one range of keys, or two."""

from typing import Any

from heedful.core.call.numerics import Documents
from heedful.masks.arrays import (
    check_count,
    check_ints,
    clipped,
    int32,
    is_torch,
    namespace,
    near,
    positions,
    scattered,
    shape_of,
)


def documents(ids: Any = None, *, position_ids: Any = None) -> Documents:
    """Each query sees its own document; with causal=True its part up to the query.

    Args:
        ids: ints (batch, seqlen): neighbours with equal numbers are one document.
        position_ids: ints (batch, seqlen), in place of ids: a document begins wherever a number is
            not one more than the number before.

    Returns:
        Documents, whose `ranges` are int32 (batch, 1, seqlen, 2). As `key_ranges` they let the
        planner cut rows where documents begin; the array alone does not.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if (ids is None) == (position_ids is None):
        raise TypeError("ids must be given, or position_ids, and not both")
    name, array = ("ids", ids) if position_ids is None else ("position_ids", position_ids)
    xp = namespace(name, array)
    _, seqlen = shape_of(name, array, "(batch, seqlen)")
    check_ints(name, array)
    step = 0
    if position_ids is not None:
        # The number after the last of few bits would be their first.
        array, step = int32(xp, array), 1
    batch = array.shape[0]
    first = xp.ones_like(array[:, :1], dtype=bool)
    begins = xp.concatenate([first, array[:, 1:] != array[:, :-1] + step], -1).reshape(-1)
    # Documents of all rows are numbered from 1; of each the table has the first place. A running
    # sum of one dim is far faster on a GPU than a running maximum.
    number = xp.cumsum(begins, 0)
    places = positions(xp, batch * seqlen + 2, array)
    table = xp.full_like(places, batch * seqlen)
    table = scattered(xp, table, xp.where(begins, number, 0), places[: batch * seqlen])
    ranges = xp.stack([table[number], table[number + 1]], -1).reshape(batch, 1, seqlen, 2)
    return Documents(ranges - (positions(xp, batch, array) * seqlen)[:, None, None, None])


def prefix(lengths: Any, seqlen: int) -> Any:
    """Prefix-LM: every query sees the prefix, and all keys up to its own place.

    Args:
        lengths: ints (batch,): of each prefix.
        seqlen: of queries and keys.

    Returns:
        int32 (batch, 1, seqlen, 2), for calls with causal=False.
    """
    xp = namespace("lengths", lengths)
    shape_of("lengths", lengths, "(batch)")
    check_ints("lengths", lengths)
    check_count("seqlen", seqlen, 0)
    rows = positions(xp, seqlen, lengths) + 1
    end = xp.maximum(rows[None], clipped(xp, lengths, seqlen)[:, None])
    return xp.stack([xp.zeros_like(end), end], -1)[:, None]


def chunks(size: int, seqlen: int, *, like: Any) -> Any:
    """Chunked local attention (Llama 4): each query sees the keys of its chunk up to its own place.

    Args:
        size: keys of a chunk.
        seqlen: of queries and keys.
        like: an array on the device that the mask is for.

    Returns:
        int32 (1, 1, seqlen, 2), for calls with causal=True or False.
    """
    xp = namespace("like", like)
    check_count("size", size, 1)
    check_count("seqlen", seqlen, 0)
    place, size = positions(xp, seqlen, like), near(size)
    return xp.stack([place // size * size, place + 1], -1)[None, None]


def padding(real: Any) -> Any:
    """All queries of a sequence see the keys from its first real one to its last.

    Args:
        real: bool (batch, seqlen): False for padding, which is before or after all real keys.

    Returns:
        int32 (batch, 1, seqlen, 2).
    """
    xp = namespace("real", real)
    batch, seqlen = shape_of("real", real, "(batch, seqlen)")
    if real.dtype != (xp.bool if is_torch(xp) else bool):
        raise TypeError(f"real must be bool, got {real.dtype}")
    place = positions(xp, seqlen, real)
    first, last = xp.where(real, place, seqlen), xp.where(real, place + 1, 0)
    begin, end = (first.amin(-1), last.amax(-1)) if is_torch(xp) else (first.min(-1), last.max(-1))
    pair = int32(xp, xp.stack([begin, end], -1))
    return xp.broadcast_to(pair[:, None, None], (batch, 1, seqlen, 2))


def local_global(left: int, first: int, seqlen: int, *, like: Any) -> Any:
    """Each query sees its own place, `left` keys before it, and the first keys of the sequence.

    Args:
        left: keys before a query.
        first: leading keys that every later query sees.
        seqlen: of queries and keys.
        like: an array on the device that the mask is for.

    Returns:
        int32 (1, 1, seqlen, 4), for calls with causal=True or False. `window_size=(left, 0, first)`
        says the same.
    """
    xp = namespace("like", like)
    for name, value in (("left", left), ("first", first), ("seqlen", seqlen)):
        check_count(name, value, 0)
    end = positions(xp, seqlen, like) + 1
    begin = end - 1 - near(left)
    begin = xp.maximum(begin, xp.zeros_like(begin))
    leading = xp.minimum(end, xp.zeros_like(end) + near(first))
    return xp.stack([xp.zeros_like(end), leading, begin, end], -1)[None, None]
