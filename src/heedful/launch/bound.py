"""A program bound to a device: loaded kernels, and the numbers of their argument buffers.

What is compiled, loaded and worked out about a buffer's layout is of a kind; numbers alone differ
between calls of a kind, packed by one struct. Running costs, per kernel, packing the addresses and
one driver call. Safe under threads: each launch takes a buffer of its own from a pool, which all
calls of the kind share.
"""

import struct
from collections.abc import Mapping, Sequence
from operator import itemgetter

from heedful.core.device import vendor_of
from heedful.launch.artifact import Artifact
from heedful.launch.compiler import artifact as compile_call
from heedful.launch.compiler import counters
from heedful.launch.driver import driver
from heedful.launch.spec import KernelCall, Pointer, Program, Scalar, TensorMap

# Encoded tensor maps that one argument keeps: a call's addresses recur, as allocators reuse memory.
_MOST_MAPS = 4096
_pack_map = struct.Struct("128s").pack_into

_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}

# (device index, arch, variant) -> function handle in that device's context.
_functions: dict[tuple, object] = {}


class KernelKind:
    """One kernel of a program, compiled and loaded, for calls that differ in numbers alone: its
    lengths may be symbols. `names`: the order in which run() is given buffer addresses."""

    def __init__(self, call: KernelCall, arch: str, device: int, names: Sequence[str]):
        self.artifact = compile_call(call, arch)
        if self.artifact.scratch_bytes:
            raise RuntimeError(f"{call.kernel.function}: compiler scratch is not supported")
        if self.artifact.cluster != call.cluster:
            raise RuntimeError(
                f"{call.kernel.function} is compiled for clusters of {self.artifact.cluster}, "
                f"the launch asks for {call.cluster}"
            )
        self._driver = driver(vendor_of(arch))
        key = (device, arch, call.variant)
        if key not in _functions:
            _functions[key] = self._driver.load(self.artifact, device)
        self._function, self._device = _functions[key], device
        self._programmatic = call.programmatic
        offsets = {p.name: p.offset for p in self.artifact.parameters}
        pointers = sorted(
            (offsets[name], names.index(a.buffer))
            for name, a in call.arguments.items()
            if isinstance(a, Pointer)
        )
        self.runs = [
            (struct.Struct(f"<{len(run)}Q").pack_into, run[0][0], _getter([i for _, i in run]))
            for run in _contiguous(pointers)
        ]
        places = _places(call)
        self.template = _packer(places, self.artifact)
        # Of each tensor map: makes it; places of its shape and strides among the numbers, of
        # the map in the buffer, and of its array among the addresses.
        self.maps = [
            (
                self._driver.TensorMapEncoder(self.artifact.tensor_maps[name]).encode,
                *_halves(places[name]),
                offsets[name],
                names.index(a.buffer),
            )
            for name, a in call.arguments.items()
            if isinstance(a, TensorMap)
        ]
        self.pool: list = []

    def take(self, kernel: "BoundKernel"):
        """A free argument buffer with the kernel's numbers in place."""
        try:
            slot = self.pool.pop()
        except IndexError:
            slot = self._driver.Slot(
                self.artifact,
                self._function,
                self._device,
                kernel.grid,
                kernel.template,
                self._programmatic,
            )
        else:
            if slot.owner is kernel:
                return slot
            slot.load(kernel.grid, kernel.template)
        slot.owner = kernel
        return slot


class BoundKernel:
    """A kernel with all its numbers: everything but addresses. Many share a kind."""

    __slots__ = ("_empty", "_kind", "_maps", "_numbers", "grid", "template")

    def __init__(self, kind: KernelKind, numbers: Sequence[int | float]):
        """numbers: as `numbers_of` orders them."""
        self._kind, self.grid = kind, tuple(numbers[:3])
        self._empty = 0 in self.grid
        self.template, self._numbers = kind.template(numbers), numbers
        # By address. Encoding asks the driver, which takes ten times as long as looking up what it
        # said.
        self._maps = [({}, *place) for place in kind.maps]

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Launches on a raw stream; the device must be current."""
        if self._empty:
            return
        kind = self._kind
        slot = kind.take(self)
        for pack_into, offset, pick in kind.runs:
            pack_into(slot.buffer, offset, *pick(addresses))
        for known, encode, shape, strides, offset, index in self._maps:
            address = addresses[index]
            encoded = known.get(address)
            if encoded is None:
                if len(known) >= _MOST_MAPS:
                    known.clear()
                numbers = self._numbers
                encoded = known[address] = encode(numbers[shape], numbers[strides], address)
            _pack_map(slot.buffer, offset, encoded)
        slot.launch(stream)
        kind.pool.append(slot)
        counters["launches"] += 1


class ProgramKind:
    """Every kernel of a program, for calls that differ in numbers alone. Compiles and loads on
    construction."""

    def __init__(self, program: Program, arch: str, device: int, names: Sequence[str]):
        self._kernels = []
        end = 0
        for call in program.calls:
            begin, end = end, end + len(numbers_of(call))
            kernel = KernelKind(call, arch, device, names)
            self._kernels.append((kernel, slice(begin, end)))

    def bind(self, numbers: Sequence[int | float]) -> list[BoundKernel]:
        """The kernels with their numbers, those of each call after those of the one before."""
        return [BoundKernel(kind, numbers[own]) for kind, own in self._kernels]


def numbers_of(call: KernelCall) -> list[int | float]:
    """All that a launch's buffer and grid hold but addresses: the grid, then each number and each
    tensor map's shape and strides, in the order of the arguments."""
    numbers: list[int | float] = [*call.grid]
    for argument in call.arguments.values():
        match argument:
            case Scalar(value=value):
                numbers.append(value)
            case TensorMap(shape=shape, strides=strides):
                numbers += (*shape, *strides)
    return numbers


def _places(call: KernelCall) -> dict[str, slice]:
    """Where the one number of a scalar, and the many of a tensor map, are among the numbers."""
    places, end = {}, len(call.grid)
    for name, argument in call.arguments.items():
        match argument:
            case Scalar():
                count = 1
            case TensorMap(shape=shape):
                count = 2 * len(shape)
            case _:
                continue
        places[name] = slice(end, end + count)
        end += count
    return places


def _halves(place: slice) -> tuple[slice, slice]:
    """A tensor map's shape and its strides."""
    middle = (place.start + place.stop) // 2
    return slice(place.start, middle), slice(middle, place.stop)


def _packer(places: Mapping[str, slice], artifact: Artifact):
    """A function from the numbers to the argument buffer with every address zero."""
    of_parameter = {}
    for name, place in places.items():
        if place.stop - place.start == 1:
            of_parameter[name] = place.start
            continue
        for part, half in zip(("shape", "strides"), _halves(place), strict=True):
            for i, index in enumerate(range(half.start, half.stop)):
                of_parameter[f"{name}.{part}[{i}]"] = index
    layout, indices, position = "<", [], 0
    for parameter in sorted(artifact.parameters, key=lambda p: p.offset):
        if parameter.name in of_parameter:
            layout += f"{parameter.offset - position}x{_FORMATS[parameter.type]}"
            position = parameter.offset + struct.calcsize("<" + _FORMATS[parameter.type])
            indices.append(of_parameter[parameter.name])
    layout += f"{artifact.parameter_bytes - position}x"
    pack = struct.Struct(layout).pack
    if not indices:
        return lambda numbers: pack()
    pick = _getter(indices)
    return lambda numbers: pack(*pick(numbers))


def _contiguous(pointers: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Groups (offset, index) pairs whose offsets follow one another by 8 bytes."""
    runs: list[list[tuple[int, int]]] = []
    for pair in pointers:
        if runs and pair[0] == runs[-1][-1][0] + 8:
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return runs


def _getter(indices: list[int]):
    """Picks items as a tuple, one item included."""
    if len(indices) == 1:
        index = indices[0]
        return lambda items: (items[index],)
    return itemgetter(*indices)
