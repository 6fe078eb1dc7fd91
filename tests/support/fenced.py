"""Tensors with guards on both sides, to see what reads or writes beside them."""

import ctypes
import mmap

import torch
from torch import Tensor

# Elements on either side: more than the nearest pages and rows beyond the ends.
GUARD = 1 << 14


class Fenced:
    """A dense tensor, `inside`, within a larger one of NaN, or of the least integer."""

    def __init__(self, inside: Tensor, around: Tensor):
        self.inside, self._around = inside, around
        self._kept = around.clone()

    @classmethod
    def like(cls, tensor: Tensor, device: torch.device | str | None = None) -> "Fenced":
        """A copy of the tensor, on `device`."""
        poison = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        device = tensor.device if device is None else device
        size = tensor.numel() + 2 * GUARD
        around = torch.full((size,), poison, dtype=tensor.dtype, device=device)
        inside = around[GUARD : GUARD + tensor.numel()].view(tensor.shape)
        inside.copy_(tensor)
        return cls(inside, around)

    def assert_whole(self) -> None:
        """AssertionError if anything was written beside the tensor."""
        for side in (slice(None, GUARD), slice(-GUARD, None)):
            now, before = (x[side].view(torch.uint8) for x in (self._around, self._kept))
            assert torch.equal(now, before), "written outside of the tensor"


def walled(tensor: Tensor) -> Tensor:
    """A copy on the CPU whose last byte is the last of a page, with one behind it that nobody may
    touch: to read one element too many ends the process. For checks in a process of their own."""
    size = tensor.numel() * tensor.element_size()
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, length + mmap.PAGESIZE)
    # PROT_NONE, which the module has no name for.
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    failed = ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + length), mmap.PAGESIZE, 0)
    assert not failed, "mprotect failed"
    copy = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=length - size
    ).view(tensor.shape)
    return copy.copy_(tensor)
