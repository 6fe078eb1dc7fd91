"""Runs bound programs on torch's memory and streams. The only users of torch's private names."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch._C._dynamo import guards

from heedful.core.base import settings
from heedful.core.base.arrays import dense_strides
from heedful.core.base.symbols import Symbol
from heedful.launch.program.bound import ProgramKind, changing, numbers_of
from heedful.launch.program.spec import Program
from heedful.torch.eager import zeros

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


# Of a tensor. As a function that is mapped, in less time than in a comprehension.
address_of = torch.Tensor.data_ptr
# What torch.compile's own code allocates with: a third of the time of torch.empty.
_empty_strided = getattr(guards, "_empty_strided_cuda", None)


Allocator = Callable[[], torch.Tensor]
# (shape, strides, dtype) -> a tensor.
Maker = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


def maker(device: torch.device) -> Maker:
    """Makes uninitialised dense tensors, of tuples. A GPU must be the current one."""
    if device.type == "cuda" and _empty_strided is not None:
        return _empty_strided

    def make(shape, _strides, dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return make


def allocator(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Any = None
) -> Allocator:
    """Makes uninitialised dense tensors of one kind. A GPU must be the current one. strides: where
    they are known; the shape is a tuple then, too."""
    if strides is None:
        shape, strides = tuple(shape), dense_strides(shape)
    return partial(maker(device), shape, strides, dtype)


# Places of arrays within a region of memory, and its size; None where a program has none.
Region = tuple[Sequence[int], int] | None
# Launches kernels with addresses, in a list for this launch alone, on a raw stream.
Launch = Callable[[list[int], int], None]


class ExecutableKind:
    """A program on one device for calls that differ in numbers alone. Compiles when the first is
    bound or run.

    outputs: all of them, in the order in which they are taken: where scratch begins in its region,
    and how large that is; the same of scratch that begins with zeros; what the kernels want.
    """

    # Of a copy, too, attributes are found fast.
    __slots__ = (
        "device",
        "index",
        "outputs",
        "scratch",
        "zeroed",
        "_arch",
        "_before",
        "_bound",
        "_end",
        "_leaves_zeros",
        "_limit",
        "_make",
        "_numbers",
        "_order",
        "_places",
        "_program",
        "_settled",
        "_wider",
    )

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
        self._make = maker(device)
        zeroed = [w for w in program.workspaces if w.zeroed]
        others = [w for w in program.workspaces if not w.zeroed]
        self._order = [*names, *(workspace.name for workspace in (*others, *zeroed))]
        self.outputs: list[Any] = []
        self._before = before
        # Where among the numbers the places of regions are, behind which comes their size.
        self.scratch, self.zeroed = (self._region(regions) for regions in (others, zeroed))
        self._leaves_zeros = all(w.left_zero for w in zeroed)
        self._end = before + len(self.outputs)
        # Now: what is asked later is no guard of a case.
        self._numbers = [numbers_of(call) for call in program.calls]
        for numbers in self._numbers:
            self.outputs += changing(numbers)
        self._bound: ProgramKind | None = None
        self._wider: ExecutableKind | None = None
        # Where they are the same for all calls.
        self._places: tuple[Region, Region] | None = None
        self._limit = settings.get("workspace_limit")

    def _region(self, workspaces: list) -> slice | None:
        """Most programs have none."""
        if not workspaces:
            return None
        begin = self._before + len(self.outputs)
        places, size = _places([workspace.buffer.nbytes for workspace in workspaces])
        self.outputs += [*places, size]
        return slice(begin, begin + len(places))

    def narrowed(self, numbers: Sequence[Any]) -> "ExecutableKind":
        """The same for some of its calls. numbers: those before its own, and its outputs, plain
        ones where these are the same for those calls."""
        other = copy(self)
        other._wider, other._settled, other._bound = self, numbers, None
        places = self.places(numbers)
        within = [place for own, size in filter(None, places) for place in (*own, size)]
        if not any([isinstance(place, Symbol) for place in within]):
            other._places = places
        return other

    def bind(self, numbers: Sequence[int | float]) -> "Executable":
        """The program with these numbers. Raises as `kernels`."""
        return Executable(self, self.kernels(numbers).bind(numbers), numbers)

    def run(self, numbers: Sequence[int | float], addresses: list[int]) -> None:
        """Runs the program as `Executable.run` of these numbers does, for lengths that most likely
        come but once: kernels are not bound, and nothing is kept. Raises as `kernels`."""
        kernels = self._bound
        if kernels is None or self._limit is not None:
            kernels = self.kernels(numbers)
        places = self._places or self.places(numbers)
        self.launcher(partial(kernels.run, numbers), places)(addresses)

    def kernels(self, numbers: Sequence[int | float]) -> ProgramKind:
        """Compiled and loaded.

        Raises ValueError where the program needs more scratch than is allowed.
        """
        if self._bound is None:
            self._bound = self._loaded(numbers)
        if self._limit is not None:
            regions = [region for region in (self.scratch, self.zeroed) if region]
            _check_scratch(sum([numbers[region.stop] for region in regions]), self._limit)
        return self._bound

    def _loaded(self, numbers: Sequence[int | float]) -> ProgramKind:
        if self._wider is not None:
            return self._wider.kernels(numbers).narrowed(self._settled)
        with torch.cuda.device(self.device):
            given = self._program, self._arch, self.index, self._order, self._numbers
            return ProgramKind(*given, self._end)

    def places(self, numbers: Sequence[Any]) -> tuple[Region, Region]:
        """Of scratch, and of such that begins with zeros."""
        scratch, zeroed = self.scratch, self.zeroed
        return (
            scratch and (numbers[scratch], numbers[scratch.stop]),
            zeroed and (numbers[zeroed], numbers[zeroed.stop]),
        )

    def launcher(self, run: Launch, places: tuple[Region, Region]) -> Callable[[list[int]], None]:
        """Calls run(addresses, stream) with the addresses that it is given, behind which it writes
        those of scratch."""
        scratch, zeroed = places
        index, make = self.index, self._make
        if zeroed is not None:
            run = self._with_zeros(run, *zeroed)
        if scratch is None:
            return lambda addresses: run(addresses, raw_stream(index))
        within, size = scratch
        shape = (size,)

        def launch(addresses: list[int]) -> None:
            memory = make(shape, _ONE, torch.uint8)
            base = memory.data_ptr()
            addresses += [base + place for place in within]
            run(addresses, raw_stream(index))

        return launch

    def _with_zeros(self, run: Launch, within: Sequence[int], size: int) -> Launch:
        """Calls run with the addresses of scratch that begins with zeros, too."""
        device, make = self.device, self._make
        shape, of_stream = (size,), zeros.of_stream
        is_large = size > zeros.MOST_BYTES
        lasting = zeros.lasting(device, _ALIGN) if self._leaves_zeros else None

        def launch(addresses: list[int], stream: int) -> None:
            base = None
            is_captured = _is_capturing()
            if lasting is not None:
                if is_captured:
                    base = lasting.take(size)
                elif lasting.is_low:
                    lasting.reserve(device)
            if base is None and (is_captured or is_large or stream == _PER_THREAD):
                # A graph must fill its own, each time that it is replayed.
                region = make(shape, _ONE, torch.uint8).zero_()
                base = region.data_ptr()
            if base is not None:
                addresses += [base + place for place in within]
                run(addresses, stream)
                return
            source = of_stream(device, stream, _ALIGN)
            with source.lock:
                base = source.take(size)
                addresses += [base + place for place in within]
                run(addresses, stream)

        return launch


class Executable:
    """A program on one device; call it with the tensors named at its kind's construction, in that
    order. run(addresses): the same with the addresses of tensors whose device is current, in a list
    for this call alone.

    Scratch comes from torch's caching allocator for the duration of the call, on the current
    stream, so that capture into a CUDA graph and several streams just work.
    """

    __slots__ = ("_kind", "run")

    def __init__(self, kind: ExecutableKind, run: Launch, numbers: Sequence[Any]):
        """run: the program with its numbers. numbers: the kind's outputs, behind those that come
        before them."""
        self._kind = kind
        self.run: Callable[[list[int]], None] = kind.launcher(run, kind.places(numbers))

    @classmethod
    def of(
        cls, program: Program, arch: str, device: torch.device, names: Sequence[str]
    ) -> "Executable":
        """Of a program by itself."""
        kind = ExecutableKind(program, arch, device, names)
        return kind.bind(tuple(kind.outputs))

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launches on the current stream of the tensors' device."""
        kind = self._kind
        if current_device() != kind.index:
            with torch.cuda.device(kind.device):
                return self(tensors)
        self.run([*map(address_of, tensors)])


_ONE = (1,)


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
