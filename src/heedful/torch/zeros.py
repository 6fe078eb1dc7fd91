"""Zeroed scratch without a launch for each call that needs some.

What a kernel counts with must start at zero. Filling a few bytes is a launch like any other, so
that many calls' worth are filled at once, for each stream, and each byte is given out once.
"""

import threading

import torch

REGION_BYTES = 1 << 18
# Beyond this a call had better fill its own.
MOST_BYTES = REGION_BYTES // 16


class Zeros:
    """Zeroed bytes for kernels on one stream, which must be current when they are taken."""

    def __init__(self, device: torch.device, align: int):
        self._device, self._align = device, align
        self._lock = threading.Lock()
        self._begin = self._end = 0
        self._region: torch.Tensor | None = None

    def take(self, nbytes: int) -> int:
        """The address of that many, at most MOST_BYTES, for one launch. A region whose last kernels
        are still to run goes back to torch's allocator, which keeps to the stream's order."""
        nbytes = -(-nbytes // self._align) * self._align
        with self._lock:
            if self._end - self._begin < nbytes:
                self._region = torch.zeros(REGION_BYTES, dtype=torch.uint8, device=self._device)
                self._begin = self._region.data_ptr()
                self._end = self._begin + REGION_BYTES
            address = self._begin
            self._begin += nbytes
        return address


_of_stream: dict[tuple[int, int], Zeros] = {}


def of_stream(device: torch.device, stream: int, align: int) -> Zeros:
    """Those of a GPU's stream, which is current."""
    key = (device.index, stream)
    zeros = _of_stream.get(key)
    if zeros is None:
        zeros = _of_stream.setdefault(key, Zeros(device, align))
    return zeros
