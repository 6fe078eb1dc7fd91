"""Runs bound programs on torch's memory and streams. The only users of torch's private names."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import call
from typing import Any

import torch
from torch._C._dynamo import guards

from heedful.core.base import settings
from heedful.core.base.arrays import ArraySpec, dense_strides
from heedful.core.base.symbols import Symbol, settled
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


# The address of a tensor. Mapping this function takes less time than a comprehension.
address_of = torch.Tensor.data_ptr
# The allocation function of torch.compile's own code: a third of the time of torch.empty.
_empty_strided = getattr(guards, "_empty_strided_cuda", None)


Allocator = Callable[[], torch.Tensor]
# (shape, strides, dtype) -> a tensor.
Maker = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


def maker(device: torch.device) -> Maker:
    """Makes uninitialised dense tensors from tuples. On a GPU, that GPU must be the current one."""
    if device.type == "cuda" and _empty_strided is not None:
        return _empty_strided

    def make(shape, _strides, dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return make


def allocator(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Any = None
) -> Allocator:
    """Makes uninitialised dense tensors of one kind. On a GPU, that GPU must be the current one.
    strides: where they are known; the shape is a tuple then, too."""
    if strides is None:
        shape, strides = tuple(shape), dense_strides(shape)
    return partial(maker(device), shape, strides, dtype)


# Places of arrays within a region of memory, and its size; None where a program has none.
Region = tuple[Sequence[int], int] | None
# Launches kernels with addresses, in a list for this launch alone, on a raw stream.
Launch = Callable[[list[int], int], None]
# Runs a program on the addresses of tensors of the current device. The list is for it alone.
Run = Callable[[list[int]], None]


class Case:
    """A program on one device for calls that differ only in numbers. It compiles when the first of
    them is bound or run.

    made: arrays that it makes for each call, dense ones: the last of the program's before scratch.
    outputs: all numbers, in the order in which they are taken: those that come before its own; the
    shapes of what is made, one after the other; their strides; where scratch begins in its region,
    and how large that is; the same of scratch that begins with zeros; what the kernels want.
    shapes: where among them the shapes are.

    Scratch comes from torch's caching allocator for the duration of the call, on the current
    stream, so that capture into a CUDA graph and several streams just work.
    """

    __slots__ = (
        *("device", "index", "outputs", "scratch", "shapes", "zeroed"),
        *("_arch", "_end", "_leaves_zeros", "_limit", "_loaded", "_made", "_make", "_numbers"),
        *("_order", "_places", "_program"),
    )

    def __init__(
        self,
        program: Program,
        arch: str,
        device: torch.device,
        names: Sequence[str],
        made: Sequence[ArraySpec] = (),
        before: Sequence[Any] = (),
    ):
        """program: its numbers may be symbols. names: of its buffers but scratch, in the order of
        addresses. before: numbers that come before its own."""
        self._program, self._arch = program, arch
        self.device, self.index, self._make = device, device.index, maker(device)
        self.outputs: list[Any] = [*before]
        begin, dims = len(before), sum([len(spec.shape) for spec in made])
        self.shapes, self._made = slice(begin, begin + dims), []
        for spec in made:
            end = begin + len(spec.shape)
            places = slice(begin, end), slice(dims + begin, dims + end)
            self._made.append((*places, getattr(torch, spec.dtype)))
            begin = end
        for sizes in ([spec.shape for spec in made], [spec.strides for spec in made]):
            self.outputs += chain(*sizes)
        zeroed = [w for w in program.workspaces if w.zeroed]
        others = [w for w in program.workspaces if not w.zeroed]
        self._order = [*names, *(workspace.name for workspace in (*others, *zeroed))]
        # The index of the places of regions among the numbers; their size follows.
        self.scratch, self.zeroed = (self._region(regions) for regions in (others, zeroed))
        self._leaves_zeros = all(w.left_zero for w in zeroed)
        # The index where the kernels' numbers begin. All questions about these are asked now: asked
        # later they would be no guards.
        self._end = len(self.outputs)
        self._numbers = [numbers_of(call) for call in program.calls]
        for numbers in self._numbers:
            self.outputs += changing(numbers)
        self._loaded: ProgramKind | None = None
        # Where they are the same for all calls.
        places = self.places(settled(self.outputs))
        within = [place for own, size in filter(None, places) for place in (*own, size)]
        moves = any([isinstance(place, Symbol) for place in within])
        self._places: tuple[Region, Region] | None = None if moves else places
        self._limit = settings.get("workspace_limit")

    def _region(self, workspaces: list) -> slice | None:
        """Most programs have none."""
        if not workspaces:
            return None
        begin = len(self.outputs)
        places, size = _places([workspace.buffer.nbytes for workspace in workspaces])
        self.outputs += [*places, size]
        return slice(begin, begin + len(places))

    def make(self, numbers: Sequence[int | float]) -> list[torch.Tensor]:
        """Makes these arrays now."""
        make = self._make
        return [
            make(numbers[shape], numbers[strides], dtype) for shape, strides, dtype in self._made
        ]

    def allocators(self, numbers: Sequence[int | float]) -> list[Allocator]:
        """The allocator of each array that is made."""
        device = self.device
        return [
            allocator(numbers[shape], dtype, device, numbers[strides])
            for shape, strides, dtype in self._made
        ]

    def maker(self, numbers: Sequence[int | float]) -> Callable[[], list[torch.Tensor]]:
        """`make` of these numbers, for many calls."""
        made = self.allocators(numbers)
        return lambda: [*map(call, made)]

    def bind(self, numbers: Sequence[int | float]) -> Run:
        """Runs the program with these numbers, in the order of `outputs`. Raises as `kernels`."""
        return self.launcher(self.kernels(numbers).bind(numbers), self.places(numbers))

    def alone(self) -> Run:
        """Runs a program by itself, whose numbers are plain. Raises as `kernels`."""
        return self.bind(tuple(self.outputs))

    def run(self, numbers: Sequence[int | float], addresses: list[int]) -> None:
        """Runs it with numbers that most likely come only once: kernels are not bound, and nothing
        is kept. Raises as `kernels`."""
        kernels = self._loaded
        if kernels is None or self._limit is not None:
            kernels = self.kernels(numbers)
        places = self._places or self.places(numbers)
        if self.zeroed is not None:
            return self.launcher(partial(kernels.run, numbers), places)(addresses)
        if places[0] is not None:
            within, size = places[0]
            memory = self._make((size,), _ONE, torch.uint8)
            base = memory.data_ptr()
            addresses += [base + place for place in within]
        kernels.run(numbers, addresses, raw_stream(self.index))

    def kernels(self, numbers: Sequence[int | float]) -> ProgramKind:
        """Compiled and loaded.

        Raises ValueError where the program needs more scratch than is allowed.
        """
        if self._loaded is None:
            with torch.cuda.device(self.device):
                given = self._program, self._arch, self.index, self._order, self._numbers
                self._loaded = ProgramKind(*given, self._end)
        if self._limit is not None:
            regions = [region for region in (self.scratch, self.zeroed) if region]
            _check_scratch(sum([numbers[region.stop] for region in regions]), self._limit)
        return self._loaded

    def places(self, numbers: Sequence[Any]) -> tuple[Region, Region]:
        """The place of scratch, and of scratch that begins with zeros."""
        scratch, zeroed = self.scratch, self.zeroed
        return (
            scratch and (numbers[scratch], numbers[scratch.stop]),
            zeroed and (numbers[zeroed], numbers[zeroed.stop]),
        )

    def launcher(self, run: Launch, places: tuple[Region, Region]) -> Run:
        """Calls run(addresses, stream) with the addresses that it is given, after which it writes
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
