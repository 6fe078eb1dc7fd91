"""Converts FlashMask's column ranges (Wang et al. 2024) to ranges of rows, where these exist."""

from typing import Any

from heedful.masks.arrays import (
    check_ints,
    clipped,
    int32,
    is_torch,
    namespace,
    positions,
    shape_of,
)

# Rows that are looked at together: their visible keys are the only array of rows x keys.
_ROWS = 128
_SIZES = {True: (1, 2), False: (2, 4)}


def from_flashmask(startend_row_indices: Any, causal: bool = True) -> Any:
    """The key_ranges of a FlashMask. It waits for the device, and cannot be traced.

    Args:
        startend_row_indices: ints (batch, heads, seqlen, n): for each key the rows that do not see
            it. causal, n = 1: rows from the number on; n = 2: rows [first, second). Not causal,
            n = 2: rows from the first on, and rows before the second; n = 4: rows [first, second)
            and [third, fourth).
        causal: whether rows also see no keys after their own place.

    Returns:
        int32 (batch, heads, seqlen, 2 or 4), for calls with the same `causal`.

    Raises:
        TypeError, ValueError: naming the argument; also where a row sees more than two runs of
        keys, which key_ranges cannot say.
    """
    name = "startend_row_indices"
    xp = namespace(name, startend_row_indices)
    *_, seqlen, count = shape_of(name, startend_row_indices, "(batch, heads, seqlen, n)")
    if count not in _SIZES[bool(causal)]:
        raise ValueError(
            f"{name} must have {' or '.join(map(str, _SIZES[bool(causal)]))} numbers a key with"
            f" causal={bool(causal)}, got {count}"
        )
    check_ints(name, startend_row_indices)
    if not seqlen:
        return int32(xp, xp.concatenate([startend_row_indices[..., :1]] * 2, -1))
    indices, parts, most = clipped(xp, startend_row_indices, seqlen), [], 0
    for first in range(0, seqlen, _ROWS):
        rows = positions(xp, seqlen, indices)[first : first + _ROWS, None]
        ranges, runs = _ranges(xp, _seen(xp, indices, rows, bool(causal)))
        most = max(most, int(runs.max()))
        if most > 2:
            raise ValueError(
                f"{name} must let each row see at most two runs of keys, as key_ranges have, got"
                f" {most} in one of rows {first} to {min(first + _ROWS, seqlen) - 1} (give the mask"
                " as a bias of bool)"
            )
        parts.append(ranges)
    return xp.concatenate(parts, -2)[..., : 2 * max(1, most)]


def _seen(xp: Any, indices: Any, rows: Any, causal: bool) -> Any:
    """Which keys rows (R, 1) see: bool (batch, heads, R, seqlen)."""
    bounds = [indices[..., None, :, i] for i in range(indices.shape[-1])]
    if len(bounds) == 1:
        hidden = rows >= bounds[0]
    elif causal:
        hidden = (rows >= bounds[0]) & (rows < bounds[1])
    elif len(bounds) == 2:
        hidden = (rows >= bounds[0]) | (rows < bounds[1])
    else:
        hidden = (rows >= bounds[0]) & (rows < bounds[1])
        hidden = hidden | ((rows >= bounds[2]) & (rows < bounds[3]))
    if causal:
        hidden = hidden | (positions(xp, indices.shape[-2], indices) > rows)
    return ~hidden


def _ranges(xp: Any, seen: Any) -> tuple[Any, Any]:
    """(the first two runs of seen keys of each row, (.., 4); how many runs it has)."""
    keys = seen.shape[-1]
    place = positions(xp, keys, seen)
    edge = xp.zeros_like(seen[..., :1])
    before = xp.concatenate([edge, seen[..., :-1]], -1)
    after = xp.concatenate([seen[..., 1:], edge], -1)
    starts, ends = seen & ~before, seen & ~after
    lowest, highest = ("amin", "amax") if is_torch(xp) else ("min", "max")
    first = getattr(xp.where(starts, place, keys), lowest)(-1)
    stop = getattr(xp.where(ends, place + 1, keys), lowest)(-1)
    second = getattr(starts * place, highest)(-1)
    last = getattr(ends * (place + 1), highest)(-1)
    runs = starts.sum(-1)
    # A row of one run has no second range: its end is no later than its beginning.
    last = xp.where(runs > 1, last, 0)
    return int32(xp, xp.stack([first, stop, second, last], -1)), runs
