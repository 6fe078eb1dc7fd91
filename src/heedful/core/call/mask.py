"""Which keys a query may see, and which key tiles a query tile touches.

Key j is visible to query i iff

    -left <= j - i - off <= right      (a bound of -1 is no bound)
    or j < first and j - i - off <= right

where `off` is the diagonal offset: `len_k - len_q + shift` when aligned bottom right (as in
flash-attn from 2.1 on, with the lengths in use), `shift` when aligned top left (SDPA, jax.nn).
"""

from functools import lru_cache
from typing import Any

from heedful.core.base.frozen import dataclass
from heedful.core.base.numbers import FAR, truth, whole, wholes


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Key tiles of one query tile: visit [first_begin, first_end) and then [begin, end).

    Tiles in [full_begin, full_end) need no mask; all other visited tiles do. The two visited
    ranges do not overlap. All bounds are tile indices.
    """

    first_begin: int
    first_end: int
    begin: int
    full_begin: int
    full_end: int
    end: int


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """The static part of the attention mask; -1 is unbounded.

    left, right: window bounds around the diagonal; causal attention has right = 0.
    first: this many leading keys are exempt from the left bound ("attention sinks" as tokens).
    bottom_right: align the diagonal to the last query and key instead of the first ones.
    shift: added to the diagonal offset (chunked prefill, ring attention).
    """

    left: int = -1
    right: int = -1
    first: int = 0
    bottom_right: bool = True
    shift: int = 0

    @classmethod
    def of(cls, causal=False, window_size=(-1, -1), *, bottom_right=True, shift=0) -> "MaskSpec":
        """The mask of flash-attn's `causal` and `window_size=(left, right[, first])`. A bound of
        FAR or more is none.

        Raises TypeError or ValueError naming the argument.
        """
        causal = truth("causal", causal)
        if not isinstance(window_size, (tuple, list)) or len(window_size) not in (2, 3):
            raise ValueError(
                "window_size must be (left, right) or (left, right, first), each an int,"
                f" got {window_size!r}"
            )
        window_size = wholes("window_size", window_size)
        left, right, first = (*window_size, 0)[:3]
        if left < -1 or right < -1:
            raise ValueError(
                f"window_size bounds must be >= -1 (-1 = unbounded), got {window_size}"
            )
        if first < 0:
            raise ValueError(f"window_size[2] must be >= 0 leading keys, got {first}")
        # A bound that no position reaches is no bound.
        left, right = (-1 if side >= FAR else side for side in (left, right))
        left = -1 if first >= FAR else left
        # Without a left bound the leading keys are visible anyway: one spelling, one kernel.
        first = first if left >= 0 else 0
        bottom_right = truth("bottom_right", bottom_right)
        return cls(left, 0 if causal else right, first, bottom_right, whole("shift", shift))

    @property
    def bounded(self) -> bool:
        """Whether any key can be hidden by position."""
        return self.left >= 0 or self.right >= 0

    @property
    def causal(self) -> bool:
        return self.left < 0 and self.right == 0

    def offset(self, len_q: int, len_k: int) -> int:
        """The diagonal offset for the lengths in use."""
        return (len_k - len_q if self.bottom_right else 0) + self.shift

    def visible(self, i: int, j: int, len_q: int, len_k: int) -> bool:
        """Whether query i sees key j."""
        distance = j - i - self.offset(len_q, len_k)
        right_ok = self.right < 0 or distance <= self.right
        left_ok = self.left < 0 or distance >= -self.left or j < self.first
        return right_ok and left_ok

    def count_visible(self, len_q: int, len_k: int) -> int:
        """The number of visible (query, key) pairs, from which the FLOPs of a call are counted."""
        if not self.bounded:
            return len_q * len_k
        off, total = self.offset(len_q, len_k), 0
        for i in range(len_q):
            stop = len_k if self.right < 0 else min(len_k, i + off + self.right + 1)
            start = 0 if self.left < 0 else max(0, i + off - self.left)
            stop = max(stop, 0)
            total += max(0, stop - start) + min(self.first, start, stop)
        return total

    def key_range(self, row: int, rows: int, tile: int, len_q: int, len_k: int) -> KeyRange:
        """Key tiles that queries [row, row + rows) touch, for key tiles of `tile` keys."""
        last = min(row + rows, len_q) - 1
        off = self.offset(len_q, len_k)
        # Per row, visible keys are [lo, hi); over rows lo and hi grow by one per row.
        hi_min = len_k if self.right < 0 else min(len_k, row + off + self.right + 1)
        hi_max = len_k if self.right < 0 else min(len_k, last + off + self.right + 1)
        lo_min = 0 if self.left < 0 else max(0, row + off - self.left)
        lo_max = 0 if self.left < 0 else max(0, last + off - self.left)
        if last < row or hi_max <= 0:
            return KeyRange(0, 0, 0, 0, 0, 0)
        end = -(-hi_max // tile)
        begin = lo_min // tile if lo_min < hi_max else end
        first_end = min(-(-min(self.first, hi_max) // tile), begin)
        full_begin = min(max(-(-lo_max // tile), begin), end)
        full_end = min(max(max(hi_min, 0) // tile, full_begin), end)
        return KeyRange(0, first_end, begin, full_begin, full_end, end)

    def query_range(
        self, col: int, cols: int, tile: int, len_q: int, len_k: int
    ) -> tuple[int, int]:
        """Query tiles [begin, end) that see any key of [col, col + cols)."""
        last = min(col + cols, len_k) - 1
        off = self.offset(len_q, len_k)
        if last < col or len_q <= 0:
            return 0, 0
        # Query i sees key j only if i >= j - off - right, and i <= j - off + left.
        lo = 0 if self.right < 0 else max(0, col - off - self.right)
        hi = len_q if self.left < 0 or col < self.first else min(len_q, last - off + self.left + 1)
        if hi <= lo:
            return 0, 0
        return lo // tile, -(-hi // tile)


_mask = lru_cache(256, typed=True)(MaskSpec.of)


def mask_of(x: Any, options: Any) -> MaskSpec:
    """The mask of a call of these operands. One diagonal a sequence is counted from its first query
    and key. Raises TypeError or ValueError."""
    offset, window = options.q_offset, tuple(options.window_size)
    if x.q_offsets is not None:
        return _mask(options.causal, window, bottom_right=False, shift=0)
    if offset is None:
        return _mask(options.causal, window)
    if not -FAR < offset < FAR:
        raise ValueError(f"q_offset must be between -{FAR} and {FAR}, got {offset}")
    mask = _mask(options.causal, window, bottom_right=False, shift=offset)
    # Where nothing depends on the diagonal, all have the same plan and kernels.
    by_distance = x.alibi_slopes is not None or x.rel_bias is not None
    return mask if mask.bounded or by_distance else _mask(options.causal, window)
