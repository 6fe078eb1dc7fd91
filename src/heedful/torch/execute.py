"""Runs bound programs on torch's memory and streams. The only users of torch's private names."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._C._dynamo import guards

from heedful.core import settings
from heedful.core.arrays import ArraySpec
from heedful.launch.bound import BoundProgram
from heedful.launch.spec import Program, Workspace
from heedful.torch import zeros

# Scratch regions start on lines that every load width and TMA accept.
_ALIGN = 256


def _absent(*_) -> int:
    raise RuntimeError("this torch was built without a GPU")


# A tenth of the time of torch.cuda.current_stream().cuda_stream and torch.cuda.current_device().
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _absent)
current_device = getattr(torch._C, "_cuda_getDevice", _absent)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _absent)
# CU_STREAM_PER_THREAD: another stream for each thread that names it.
_PER_THREAD = 2


# What torch.compile's own code allocates with: a third of the time of torch.empty.
_empty_strided = getattr(guards, "_empty_strided_cuda", None)


Allocator = Callable[[], torch.Tensor]


def allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Allocator:
    """Makes uninitialised dense tensors of one kind. A GPU must be the current one."""
    if device.type == "cuda" and _empty_strided is not None:
        strides = ArraySpec.contiguous(tuple(shape), "").strides
        return partial(_empty_strided, tuple(shape), strides, dtype)
    return partial(torch.empty, tuple(shape), dtype=dtype, device=device)


class Executable:
    """A program on one device; call it with the tensors named at construction, in that order.

    Scratch comes from torch's caching allocator for the duration of the call, on the current
    stream, so that capture into a CUDA graph and several streams just work.
    """

    def __init__(self, program: Program, arch: str, device: torch.device, names: Sequence[str]):
        self._index, self._device = device.index, device
        zeroed = [w for w in program.workspaces if w.zeroed]
        others = [w for w in program.workspaces if not w.zeroed]
        self._zeroed_places, zeroed_size = _places(zeroed)
        self._places, size = _places(others)
        self._zeroed_size = zeroed_size
        limit = settings.get("workspace_limit")
        if limit is not None and size + zeroed_size > limit:
            raise ValueError(
                f"HEEDFUL_WORKSPACE_LIMIT_MB allows {limit} bytes of scratch,"
                f" this call needs {size + zeroed_size}"
            )
        self._scratch = allocator((size,), torch.uint8, device)
        self._zeroed_scratch = allocator((zeroed_size,), torch.uint8, device)
        order = [*names, *(workspace.name for workspace in (*others, *zeroed))]
        with torch.cuda.device(device):
            bound = BoundProgram(program, arch, device.index, order)
        self._run = bound.kernels[0].run if len(bound.kernels) == 1 else bound.run

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launches on the current stream of the tensors' device."""
        index = self._index
        if current_device() != index:
            with torch.cuda.device(index):
                return self(tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._places:
            scratch = self._scratch()
            base = scratch.data_ptr()
            addresses += [base + place for place in self._places]
        stream = raw_stream(index)
        if not self._zeroed_places:
            self._run(addresses, stream)
        elif self._zeroed_size > zeros.MOST_BYTES or stream == _PER_THREAD or _is_capturing():
            # A graph must fill its own, each time that it is replayed.
            region = self._zeroed_scratch().zero_()
            base = region.data_ptr()
            self._run(addresses + [base + place for place in self._zeroed_places], stream)
        else:
            source = zeros.of_stream(self._device, stream, _ALIGN)
            with source.lock:
                base = source.take(self._zeroed_size)
                addresses += [base + place for place in self._zeroed_places]
                self._run(addresses, stream)


def _places(workspaces: Sequence[Workspace]) -> tuple[list[int], int]:
    """Where in one region each begins, and how large that is."""
    places, size = [], 0
    for workspace in workspaces:
        places.append(size)
        size += -(-workspace.buffer.nbytes // _ALIGN) * _ALIGN
    return places, size
