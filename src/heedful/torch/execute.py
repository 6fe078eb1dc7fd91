"""Runs bound programs on torch's memory and streams. The only users of torch's private names."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._dynamo import guards

from heedful.core import settings
from heedful.launch.bound import BoundKernel, ProgramKind, numbers_of
from heedful.launch.spec import Program
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
        return partial(_empty_strided, tuple(shape), _dense_strides(shape), dtype)
    return partial(torch.empty, tuple(shape), dtype=dtype, device=device)


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


class ExecutableKind:
    """A program on one device for calls that differ in numbers alone. Compiles at the first `bind`.

    program: its numbers may be symbols. outputs: all of them, in the order that `bind` takes.
    """

    def __init__(self, program: Program, arch: str, device: torch.device, names: Sequence[str]):
        self._program, self._arch, self.device = program, arch, device
        zeroed = [w for w in program.workspaces if w.zeroed]
        others = [w for w in program.workspaces if not w.zeroed]
        self._order = [*names, *(workspace.name for workspace in (*others, *zeroed))]
        self.counts = len(others), len(zeroed)
        self.outputs = [w.buffer.nbytes for w in (*others, *zeroed)]
        for call in program.calls:
            self.outputs += numbers_of(call)
        self._bound: ProgramKind | None = None

    def bind(self, numbers: Sequence[int | float]) -> "Executable":
        """The program with these numbers."""
        if self._bound is None:
            with torch.cuda.device(self.device):
                names = self._order
                self._bound = ProgramKind(self._program, self._arch, self.device.index, names)
        kernels = self._bound.bind(numbers[sum(self.counts) :])
        return Executable(self.device, kernels, self.counts, numbers)


class Executable:
    """A program on one device; call it with the tensors named at its kind's construction, in that
    order.

    Scratch comes from torch's caching allocator for the duration of the call, on the current
    stream, so that capture into a CUDA graph and several streams just work.
    """

    __slots__ = (
        "_device",
        "_index",
        "_places",
        "_run",
        "_scratch",
        "_zeroed_places",
        "_zeroed_scratch",
        "_zeroed_size",
    )

    def __init__(
        self,
        device: torch.device,
        kernels: Sequence[BoundKernel],
        counts: tuple[int, int],
        sizes: Sequence[Any],
    ):
        """counts: regions of scratch, and zeroed ones; sizes: of both, in bytes."""
        self._index, self._device = device.index, device
        plain, zeroed = counts
        self._scratch = self._zeroed_scratch = None
        size = self._zeroed_size = 0
        # Most programs have none, and most lengths come once.
        if plain:
            self._places, size = _places(sizes[:plain])
            self._scratch = allocator((size,), torch.uint8, device)
        if zeroed:
            self._zeroed_places, self._zeroed_size = _places(sizes[plain : plain + zeroed])
            self._zeroed_scratch = allocator((self._zeroed_size,), torch.uint8, device)
        if plain or zeroed:
            _check_scratch(size + self._zeroed_size)
        self._run = kernels[0].run if len(kernels) == 1 else partial(_run_all, tuple(kernels))

    @classmethod
    def of(
        cls, program: Program, arch: str, device: torch.device, names: Sequence[str]
    ) -> "Executable":
        """Of a program by itself."""
        kind = ExecutableKind(program, arch, device, names)
        return kind.bind(kind.outputs)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launches on the current stream of the tensors' device."""
        index = self._index
        if current_device() != index:
            with torch.cuda.device(index):
                return self(tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._scratch is not None:
            scratch = self._scratch()
            base = scratch.data_ptr()
            addresses += [base + place for place in self._places]
        stream = raw_stream(index)
        if self._zeroed_scratch is None:
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


def _run_all(kernels: tuple[BoundKernel, ...], addresses: Sequence[int], stream: int) -> None:
    for kernel in kernels:
        kernel.run(addresses, stream)


def _check_scratch(size: int) -> None:
    limit = settings.get("workspace_limit")
    if limit is not None and size > limit:
        raise ValueError(
            f"HEEDFUL_WORKSPACE_LIMIT_MB allows {limit} bytes of scratch, this call needs {size}"
        )


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where in one region each begins, and how large that is."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return places, end
