"""A second opinion on LDS races: record every access of a run, then look for conflicts.

Shares nothing with the shadow in heedful.emulator.machine.lds but the addresses: an access occupies
its words during every epoch from its issue until its wave has waited for it, and two waves conflict
if both occupy a word in one epoch and one of them writes.
"""

from contextlib import contextmanager

import numpy as np

from heedful.emulator.machine import lds


class Trace:
    """Accesses as rows (word, first epoch, last epoch, wave, is write)."""

    def __init__(self):
        self.rows: list[np.ndarray] = []
        self.known: dict[int, tuple] = {}
        self.since: dict[tuple[int, int, int], int] = {}

    def begin(self, batch, effect, address, nbytes: int, write: bool):
        """An access has been issued by the waves of a batch."""
        self.known[id(effect)] = (effect, batch.machine, address + 0, nbytes, write, batch.mask)
        for g in range(batch.rect.g0, batch.rect.g1):
            for w in range(batch.rect.w0, batch.rect.w1):
                self.since[id(effect), g, w] = int(batch.machine.epoch[g])

    def end(self, batch, effect):
        """The waves of a batch have waited for it."""
        self._close(batch.rect, effect, batch.machine.epoch)

    def _close(self, rect, effect, epochs):
        _, _, address, nbytes, write, mask = self.known[id(effect)]
        inside = effect.rect.intersect(rect)
        if not inside:
            return
        for g in range(inside.g0, inside.g1):
            for w in range(inside.w0, inside.w1):
                first = self.since.pop((id(effect), g, w), None)
                if first is None:
                    continue
                at = (g - effect.rect.g0, w - effect.rect.w0)
                words = np.unique(
                    (address[at][mask[at]][:, None] + np.arange(nbytes)) // 4 + g * 2**32
                )
                row = np.empty((len(words), 5), np.int64)
                row[:, 0], row[:, 1:] = words, (first, int(epochs[g]), w, write)
                self.rows.append(row)

    def conflicts(self) -> int:
        """How many (word, epoch) pairs two waves fight over."""
        for effect, machine, *_ in self.known.values():  # never waited for: until the very end
            self._close(effect.rect, effect, machine.epoch)
        if not self.rows:
            return 0
        rows = np.concatenate(self.rows)
        count = rows[:, 2] - rows[:, 1] + 1
        step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        rows = np.repeat(rows, count, axis=0)
        key = rows[:, 0] * 4096 + rows[:, 1] + step
        order = np.argsort(key, kind="stable")
        key, wave, write = key[order], rows[order, 3], rows[order, 4]
        starts = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        low, high = np.minimum.reduceat(wave, starts), np.maximum.reduceat(wave, starts)
        return int(((low != high) & (np.maximum.reduceat(write, starts) > 0)).sum())


@contextmanager
def recorded():
    """Record the LDS accesses of the emulations run inside; gives the Trace."""
    trace, kept = Trace(), {}

    def wrap(name, write):
        original = kept[name] = getattr(lds.Lds, name)

        def method(self, batch, at, address, nbytes, *rest):
            result = original(self, batch, at, address, nbytes, *rest)
            effects = result[1] if name == "load" else result
            where = np.broadcast_to(address, batch.shape)
            for effect in effects:
                trace.begin(batch, effect, where, nbytes, write)
            return result

        setattr(lds.Lds, name, method)

    def complete(self, batch, original):
        trace.end(batch, self)
        return original(self, batch)

    for name, write in (("load", False), ("store", True), ("start_dma", True)):
        wrap(name, write)
    touch, dma = lds._Touch.complete, lds._Dma.complete
    lds._Touch.complete = lambda self, batch: complete(self, batch, touch)
    lds._Dma.complete = lambda self, batch: complete(self, batch, dma)
    try:
        yield trace
    finally:
        for name, original in kept.items():
            setattr(lds.Lds, name, original)
        lds._Touch.complete, lds._Dma.complete = touch, dma
