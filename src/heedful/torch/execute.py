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


def allocator(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Any = None
) -> Allocator:
    """Makes uninitialised dense tensors of one kind. A GPU must be the current one. strides: where
    they are known; the shape is a tuple then, too."""
    if device.type == "cuda" and _empty_strided is not None:
        if strides is None:
            shape, strides = tuple(shape), _dense_strides(shape)
        return partial(_empty_strided, shape, strides, dtype)
    return partial(torch.empty, tuple(shape), dtype=dtype, device=device)


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))


class ExecutableKind:
    """A program on one device for calls that differ in numbers alone. Compiles at the first `bind`.

    outputs: all of them, in the order that `bind` takes: where scratch begins in its region, and
    how large that is; the same of scratch that begins with zeros; what the kernels want.
    """

    def __init__(
        self,
        program: Program,
        arch: str,
        device: torch.device,
        names: Sequence[str],
        before: int = 0,
    ):
        """program: its numbers may be symbols. before: how many numbers come before its own."""
        self._program, self._arch = program, arch
        self.device, self.index = device, device.index
        zeroed = [w for w in program.workspaces if w.zeroed]
        others = [w for w in program.workspaces if not w.zeroed]
        self._order = [*names, *(workspace.name for workspace in (*others, *zeroed))]
        self.outputs: list[Any] = []
        self._before = before
        # Where among the numbers the places of regions are, behind which comes their size.
        self.scratch, self.zeroed = (self._region(regions) for regions in (others, zeroed))
        self._end = before + len(self.outputs)
        for call in program.calls:
            self.outputs += numbers_of(call)
        self._bound: ProgramKind | None = None
        self._limit = settings.get("workspace_limit")

    def _region(self, workspaces: list) -> slice | None:
        """Most programs have none."""
        if not workspaces:
            return None
        begin = self._before + len(self.outputs)
        places, size = _places([workspace.buffer.nbytes for workspace in workspaces])
        self.outputs += [*places, size]
        return slice(begin, begin + len(places))

    def bind(self, numbers: Sequence[int | float], once: bool = False) -> "Executable":
        """The program with these numbers. once: for lengths that most likely come but once; its
        kernels are not bound, and nothing is kept.

        Raises ValueError where it needs more scratch than is allowed.
        """
        if self._bound is None:
            with torch.cuda.device(self.device):
                self._bound = ProgramKind(
                    self._program, self._arch, self.index, self._order, self._end
                )
        if self._limit is not None:
            regions = [region for region in (self.scratch, self.zeroed) if region]
            _check_scratch(sum([numbers[region.stop] for region in regions]), self._limit)
        return Executable(self, self._bound, numbers, once)


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
        self, kind: ExecutableKind, kernels: ProgramKind, numbers: Sequence[Any], once: bool
    ):
        """numbers: the kind's outputs, behind those that come before them."""
        self._index, self._device = kind.index, kind.device
        if once:
            self._run = partial(kernels.run, numbers)
        else:
            bound = kernels.bind(numbers)
            self._run = bound[0].run if len(bound) == 1 else partial(_run_all, tuple(bound))
        self._scratch = self._zeroed_scratch = None
        region = kind.scratch
        if region is not None:
            self._places, size = numbers[region], numbers[region.stop]
            self._scratch = allocator((size,), torch.uint8, kind.device, _ONE)
        region = kind.zeroed
        if region is not None:
            self._zeroed_places, size = numbers[region], numbers[region.stop]
            self._zeroed_size = size
            self._zeroed_scratch = allocator((size,), torch.uint8, kind.device, _ONE)

    @classmethod
    def of(
        cls, program: Program, arch: str, device: torch.device, names: Sequence[str]
    ) -> "Executable":
        """Of a program by itself."""
        kind = ExecutableKind(program, arch, device, names)
        return kind.bind(tuple(kind.outputs))

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
        run = self._run
        if self._zeroed_scratch is None:
            run(addresses, stream)
        elif self._zeroed_size > zeros.MOST_BYTES or stream == _PER_THREAD or _is_capturing():
            # A graph must fill its own, each time that it is replayed.
            region = self._zeroed_scratch().zero_()
            base = region.data_ptr()
            run(addresses + [base + place for place in self._zeroed_places], stream)
        else:
            source = zeros.of_stream(self._device, stream, _ALIGN)
            with source.lock:
                base = source.take(self._zeroed_size)
                addresses += [base + place for place in self._zeroed_places]
                run(addresses, stream)


_ONE = (1,)


def _run_all(kernels: tuple[BoundKernel, ...], addresses: Sequence[int], stream: int) -> None:
    for kernel in kernels:
        kernel.run(addresses, stream)


def _check_scratch(size: int, limit: int) -> None:
    if size > limit:
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
