"""Zeroed scratch, without a launch for each call that needs it.

The counters of a kernel must start at zero. Filling a few bytes is a launch like any other. So each
stream has a region that is filled once for many calls, each of which takes other bytes. A used up
region is filled again, on the same stream and so after the kernels that used it. A captured call
would have to fill its bytes at each replay. It need not if its kernels leave zeros: then it gets
bytes that are filled once, and that no other call uses for the life of the process.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from heedful.core.base.forks import new_lock

REGION_BYTES = 1 << 18
# A call that needs more fills its own.
MOST_BYTES = REGION_BYTES // 16
# Bytes for a device's captured calls: enough for 2,000 calls of 64 sequences and 8 KV heads.
# Without a limit, repeated captures would take ever more.
LASTING_BYTES = 1 << 22
MOST_LASTING_BYTES = 1 << 26


class Zeros:
    """Zeroed bytes for kernels on one stream, which must be current when they are taken.

    lock: held from `take` until the kernel that counts in the bytes is queued. Otherwise another
    thread could queue the next fill, and a kernel with the same bytes, before it. Code under the
    lock must not take zeros.
    """

    def __init__(self, align: int, new_region: Callable[[], torch.Tensor]):
        """new_region: makes the region, of REGION_BYTES, at the first take."""
        self.lock = new_lock()
        self._align, self._new_region = align, new_region
        self._next = self._end = 0
        self._region: torch.Tensor | None = None

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` zeroed bytes, at most MOST_BYTES."""
        nbytes = -(-nbytes // self._align) * self._align
        address = self._next
        if self._end - address < nbytes:
            address = self._fill()
        self._next = address + nbytes
        return address

    def _fill(self) -> int:
        if self._region is None:
            self._region = self._new_region()
        # If the fill fails, the region is lost: nothing tells how far it got.
        self._end = self._next
        self._region.zero_()
        begin = self._region.data_ptr()
        self._end = begin + self._region.numel()
        return begin


_of_stream: dict[tuple[int, int], Zeros] = {}


def of_stream(device: torch.device, stream: int, align: int) -> Zeros:
    """The Zeros of a GPU's stream, which must be current."""
    key = (device.index, stream)
    zeros = _of_stream.get(key)
    return zeros or _of_stream.setdefault(key, Zeros(align, lambda: unpooled(REGION_BYTES, device)))


class Lasting:
    """Zeroed bytes of a device for captured calls. Each call keeps its bytes for the life of the
    process. is_low: whether they may soon run out, below the limit. Nothing can be allocated while
    a stream is captured. So callers outside of a capture call `reserve` when it is low.
    """

    def __init__(self, align: int):
        self.is_low = True
        self._lock, self._align = new_lock(), align
        self._next = self._end = 0
        self._regions: list[torch.Tensor] = []

    def reserve(self, device: torch.device) -> None:
        """Reserves bytes on this GPU, if it has room. A lack of room raises nothing; other errors
        of torch's allocator are raised."""
        with self._lock:
            if not self.is_low:
                return
            self.is_low = False
            try:
                region = unpooled(LASTING_BYTES, device)
            except torch.OutOfMemoryError:
                # Captured calls can do without.
                return
            region.zero_()
            # A graph may be replayed on any stream.
            finish(device)
            self._regions.append(region)
            self._next = region.data_ptr()
            self._end = self._next + region.numel()

    def take(self, nbytes: int) -> int | None:
        """The address of `nbytes` zeroed bytes, None if there are not enough."""
        nbytes = -(-nbytes // self._align) * self._align
        with self._lock:
            address = self._next
            left = self._end - address - nbytes
            can_grow = len(self._regions) < MOST_LASTING_BYTES // LASTING_BYTES
            self.is_low = can_grow and left < LASTING_BYTES // 2
            if left < 0:
                return None
            self._next = address + nbytes
            return address


_lasting: dict[int | None, Lasting] = {}


def lasting(device: torch.device, align: int) -> Lasting:
    """The Lasting of a GPU."""
    return _lasting.get(device.index) or _lasting.setdefault(device.index, Lasting(align))


def finish(device: torch.device) -> None:
    """Waits for the work queued on a GPU's current stream."""
    torch.cuda.current_stream(device).synchronize()


def unpooled(nbytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised bytes for the life of the process, ready for the current stream of a GPU.

    They come from torch's default pool, whatever pool is in use here: a pool of torch.compile's
    CUDA graphs, a MemPool or a graph's pool must not hold what outlives it. Torch chooses a pool by
    the thread or the capturing stream: a new thread, on the default stream, has neither. Raises
    what torch's allocator raises.
    """
    made: list[tuple[torch.Tensor, Any]] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            with torch.cuda.device(device):
                region = torch.empty(nbytes, dtype=torch.uint8, device=device)
                made.append((region, torch.cuda.current_stream().record_event()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    region, ready = made[0]
    # The default stream may still use what the memory was before.
    torch.cuda.current_stream(device).wait_event(ready)
    return region
