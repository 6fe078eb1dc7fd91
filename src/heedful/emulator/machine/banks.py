"""LDS bank conflicts, counted by a simple model.

LDS has 32 banks of 4 bytes on CDNA3 and 64 on CDNA4. An access is served in groups of consecutive
lanes whose data would fill every bank once; a group takes as many cycles as the fullest bank has
distinct words. The count is of the cycles beyond one per group. The hardware's grouping of wide
accesses is not documented, so compare counts with each other and not with a profiler's.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

BANKS = {"gfx942": 32, "gfx950": 64}
# Instead of the address of a lane that accesses nothing.
_NOBODY = -(1 << 40)


class BankCounter:
    """Counts extra cycles per instruction; patterns of addresses are remembered."""

    def __init__(self, arch: str, counts: Counter):
        self._banks, self._counts = BANKS[arch], counts
        self._known: dict[tuple[int, bytes], int] = {}

    def count(self, pc: int, address, nbytes: int, mask):
        """Add the conflicts of an access by (groups, waves, 64) lanes; `mask` or True if all."""
        address = np.where(mask, address - address[..., :1], _NOBODY)
        key = (nbytes, address.tobytes())
        if key not in self._known:
            self._known[key] = self._extra_cycles(address.reshape(-1, 64), nbytes)
        if self._known[key]:
            self._counts[pc] += self._known[key]

    def _extra_cycles(self, address, nbytes: int) -> int:
        """Cycles beyond one per group of lanes, summed over waves (rows of 64 byte addresses)."""
        together = min(max(self._banks * 4 // max(nbytes, 4), 1), 64)
        rest = [(0, 0), (0, -64 % together)]
        groups = np.pad(address, rest, constant_values=_NOBODY).reshape(-1, together)
        words = (groups >> 2)[..., None] + np.arange(max(nbytes // 4, 1))
        words = np.where(groups[..., None] == _NOBODY, _NOBODY, words).reshape(len(groups), -1)
        words.sort(axis=1)
        counted = words != _NOBODY
        counted[:, 1:] &= words[:, 1:] != words[:, :-1]
        bank = words % self._banks + self._banks * np.arange(len(groups))[:, None]
        load = np.bincount(bank[counted], minlength=self._banks * len(groups))
        return int(np.maximum(load.reshape(len(groups), -1).max(axis=1) - 1, 0).sum())
