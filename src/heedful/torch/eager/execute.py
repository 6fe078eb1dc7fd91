"""Runs bound programs on torch's memory and streams, by torch's private names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch._C._dynamo import guards

from heedful.core.base import settings
from heedful.core.base.arrays import ArraySpec
from heedful.core.base.symbols import Symbol, settled
from heedful.launch.program.bound import ProgramKind, changing, numbers_of
from heedful.launch.program.buffers import beginning
from heedful.launch.spec import Program
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
# The allocation function in the code that torch.compile generates: a third of the time of
# torch.empty.
_empty_strided = getattr(guards, "_empty_strided_cuda", None)


# (shape, strides, dtype) -> an uninitialised dense tensor. A GPU must be the current device.
Maker = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


def maker(device: torch.device) -> Maker:
    """Makes tensors of a device from tuples."""
    if device.type == "cuda" and _empty_strided is not None:
        return _empty_strided

    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


# Places of arrays within a region of memory, and its size; None where a program has none.
Region = tuple[Sequence[int], int] | None
# Launches kernels with addresses, in a list that it may change, on a raw stream.
Launch = Callable[[list[int], int], None]
# Runs a program on the addresses of tensors, in a list that it may change; returns what it makes.
Run = Callable[[list[int]], list[torch.Tensor]]


class Case:
    """A program on one device for calls that differ only in numbers. It compiles when the first of
    them is bound or run. outputs: all numbers, in the order in which they are used: those of the
    caller (`before`); the shapes of what is made, one after the other; their strides; the places of
    scratch in its region, and the region's size; the same for scratch that begins with zeros; the
    numbers of the kernels. shapes: the indices of the shapes.

    Scratch comes from torch's caching allocator for the duration of the call, on the current
    stream, so that CUDA graph capture and several streams work.
    """

    __slots__ = (
        *("device", "index", "outputs", "scratch", "shapes", "zeroed"),
        *("_arch", "_begins", "_end", "_leaves_zeros", "_limit", "_loaded", "_made", "_make"),
        *("_numbers", "_order", "_places", "_program"),
    )

    def __init__(
        self,
        program: Program,
        arch: str,
        device: torch.device,
        inputs: Iterable[str],
        made: Mapping[str, ArraySpec],
        before: Sequence[Any] = (),
    ):
        """program: its numbers may be symbols. inputs: the buffers whose addresses a run gets, in
        their order. made: those that each run makes, dense, the last filled as `beginning` says.
        before: the caller's numbers."""
        self._program, self._arch = program, arch
        self.device, self.index, self._make = device, device.index, maker(device)
        self.outputs: list[Any] = [*before]
        begin, dims = len(before), sum([len(spec.shape) for spec in made.values()])
        self.shapes, self._made = slice(begin, begin + dims), []
        for spec in made.values():
            end = begin + len(spec.shape)
            places = slice(begin, end), slice(dims + begin, dims + end)
            self._made.append((*places, getattr(torch, spec.dtype)))
            begin = end
        for facts in zip(*[(spec.shape, spec.strides) for spec in made.values()], strict=True):
            self.outputs += chain(*facts)
        zeroed = [w for w in program.workspaces if w.zeroed]
        others = [w for w in program.workspaces if not w.zeroed]
        self._order = [*inputs, *made, *(workspace.name for workspace in (*others, *zeroed))]
        self._begins = beginning(self._order)
        first = len(self.outputs)
        # The index of the places of regions among the numbers; their size follows.
        self.scratch, self.zeroed = (self._region(regions) for regions in (others, zeroed))
        self._leaves_zeros = all(w.left_zero for w in zeroed)
        # The index where the kernels' numbers begin. All questions about these are asked now: later
        # ones would not become guards.
        self._end = len(self.outputs)
        self._numbers = [numbers_of(call) for call in program.calls]
        for numbers in self._numbers:
            self.outputs += [numbers[index] for index in changing(numbers)]
        self._loaded: ProgramKind | None = None
        # Where in the region they are, if the same for all calls.
        settles = settled(self.outputs)
        moves = any([isinstance(place, Symbol) for place in settles[first : self._end]])
        self._places: tuple[Region, Region] | None = None if moves else self.places(settles)
        self._limit = settings.get("workspace_limit")

    def _region(self, workspaces: list) -> slice | None:
        """Most programs have none."""
        if not workspaces:
            return None
        begin = len(self.outputs)
        places, size = _places([workspace.buffer.nbytes for workspace in workspaces])
        self.outputs += [*places, size]
        return slice(begin, begin + len(places))

    def bind(self, numbers: Sequence[int | float], turned: int = 0) -> Run:
        """A function that runs the program with these numbers, in the order of `outputs`. turned:
        so many of what it makes, of four dims, come with the middle dims exchanged, without a view.
        Raises as `kernels`."""
        launch, make = self.kernels(numbers).bind(numbers), self._make
        scratch, zeroed = self.places(numbers)
        if zeroed is not None:
            launch = self._with_zeros(launch, *zeroed)
        made: list[Any] = [(numbers[s], numbers[t], dtype) for s, t, dtype in self._made]
        made[:turned] = [(*[(a, c, b, d) for a, b, c, d in x], of) for *x, of in made[:turned]]
        makers = [partial(make, *facts) for facts in made]
        index, device, begins = self.index, self.device, self._begins
        within, size = scratch or ((), 0)
        shape = (size,)

        def run(addresses: list[int]) -> list[torch.Tensor]:
            if current_device() != index:
                with torch.cuda.device(device):
                    return run(addresses)
            made = []
            for new in makers:
                tensor = new()
                addresses.append(tensor.data_ptr())
                made.append(tensor)
            if begins is not None:
                made[-1].fill_(begins)
            if scratch is not None:
                memory = make(shape, _ONE, torch.uint8)
                base = memory.data_ptr()
                # In Python 3.11 a comprehension is a function of its own, which takes longer.
                for place in within:
                    addresses.append(base + place)
            launch(addresses, raw_stream(index))
            return made

        return run

    def once(self, numbers: Sequence[int | float], addresses: list[int]) -> list[torch.Tensor]:
        """`bind(numbers)(addresses)` for numbers that likely come only once: kernels are not bound,
        and nothing is kept."""
        if current_device() != self.index:
            with torch.cuda.device(self.device):
                return self.once(numbers, addresses)
        kernels, make = self._loaded, self._make
        if kernels is None or self._limit is not None:
            kernels = self.kernels(numbers)
        made = [make(numbers[s], numbers[t], dtype) for s, t, dtype in self._made]
        addresses += map(address_of, made)
        if self._begins is not None:
            made[-1].fill_(self._begins)
        scratch, zeroed = self._places or self.places(numbers)
        if scratch is not None:
            within, size = scratch
            memory = make((size,), _ONE, torch.uint8)
            base = memory.data_ptr()
            addresses += [base + place for place in within]
        if zeroed is None:
            kernels.run(numbers, addresses, raw_stream(self.index))
        else:
            launch = self._with_zeros(partial(kernels.run, numbers), *zeroed)
            launch(addresses, raw_stream(self.index))
        return made

    def alone(self) -> Run:
        """A function that runs the program, whose numbers must be plain. Raises as `kernels`."""
        return self.bind(tuple(self.outputs))

    def kernels(self, numbers: Sequence[int | float]) -> ProgramKind:
        """The kernels, compiled and loaded. Raises ValueError if the program needs more scratch
        than is allowed.
        """
        if self._loaded is None:
            with torch.cuda.device(self.device):
                arguments = self._program, self._arch, self.index, self._order, self._numbers
                self._loaded = ProgramKind(*arguments, self._end)
        if self._limit is not None:
            regions = [region for region in (self.scratch, self.zeroed) if region]
            size = sum([numbers[region.stop] for region in regions])
            if size > self._limit:
                raise ValueError(
                    f"HEEDFUL_WORKSPACE_LIMIT_MB allows {self._limit} bytes of scratch, this call"
                    f" needs {size}"
                )
        return self._loaded

    def places(self, numbers: Sequence[Any]) -> tuple[Region, Region]:
        """The place of scratch, and of scratch that begins with zeros."""
        scratch, zeroed = self.scratch, self.zeroed
        return (
            scratch and (numbers[scratch], numbers[scratch.stop]),
            zeroed and (numbers[zeroed], numbers[zeroed.stop]),
        )

    def _with_zeros(self, run: Launch, within: Sequence[int], size: int) -> Launch:
        """`run`, with the addresses of zeroed scratch added."""
        device, make = self.device, self._make
        shape, of_stream = (size,), zeros.of_stream
        is_large = size > zeros.MOST_BYTES
        lasting = zeros.lasting(device, _ALIGN) if self._leaves_zeros else None

        def launch(addresses: list[int], stream: int) -> None:
            is_captured = _is_capturing()
            if lasting is not None and lasting.is_low and not is_captured:
                lasting.reserve(device)
            if not (is_captured or is_large or stream == _PER_THREAD):
                source = of_stream(device, stream, _ALIGN)
                with source.lock:
                    base = source.take(size)
                    for place in within:
                        addresses.append(base + place)
                    run(addresses, stream)
                return
            base = lasting.take(size) if is_captured and lasting is not None else None
            if base is None:
                # A captured graph must fill it at each replay.
                region = make(shape, _ONE, torch.uint8).zero_()
                base = region.data_ptr()
            addresses += [base + place for place in within]
            run(addresses, stream)

        return launch


_ONE = (1,)


def as_results(made: list[Any], keeps_rest: bool, out: Any = None) -> Any:
    """(out, lse or None, another result or None) from what a run made; `out` if the caller passed
    it. lse: a pair with its rest if that is kept."""
    if out is not None:
        made = [out, *made]
    if keeps_rest:
        made[1:3] = [(made[1], made[2])]
    return (*made, None, None)[:3]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The start of each in one region, and the region's size."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return places, end
