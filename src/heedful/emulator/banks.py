"""LDS bank conflicts, counted by a simple model.

LDS has 32 banks of 4 bytes on CDNA3 and 64 on CDNA4. An access is served in groups of consecutive
lanes whose data would fill every bank once; a group takes as many cycles as the fullest bank has
distinct words. What is counted is the cycles beyond one per group. The hardware's grouping of wide
accesses is not documented, so compare counts with each other and not with a profiler's.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

BANKS = {"gfx942": 32, "gfx950": 64}


class BankCounter:
    """Counts extra cycles per instruction; patterns of addresses are remembered."""

    def __init__(self, arch: str, counts: Counter):
        self._banks, self._counts = BANKS[arch], counts
        self._known: dict[tuple[int, bytes], int] = {}

    def count(self, pc: int, address, nbytes: int, mask):
        """Add the conflicts of an access by (groups, waves, 64) lanes; `mask` or True if all."""
        address = np.where(mask, address - address[..., :1], -1)
        key = (nbytes, address.tobytes())
        if key not in self._known:
            lanes = address.reshape(-1, 64)
            self._known[key] = sum(self._extra_cycles(wave, nbytes) for wave in lanes)
        if self._known[key]:
            self._counts[pc] += self._known[key]

    def _extra_cycles(self, address, nbytes: int) -> int:
        together = max(self._banks * 4 // max(nbytes, 4), 1)
        extra = 0
        for start in range(0, 64, together):
            group = address[start : start + together]
            group = group[group != -1]
            words = {int(a) // 4 + i for a in group for i in range(max(nbytes // 4, 1))}
            if words:
                extra += max(Counter(w % self._banks for w in words).values()) - 1
        return extra
