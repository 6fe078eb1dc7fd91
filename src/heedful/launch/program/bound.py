"""A program bound to a device: loaded kernels, and the numbers of their argument buffers.

Compiled code, loaded kernels and the layout of buffers belong to a kind. Calls of a kind differ
only in some numbers; an image of the buffer holds all others. A call that comes only once packs a
whole buffer and keeps nothing. A call that comes again is bound to its numbers: it then packs the
addresses of all kernels at once, and calls the driver for each kernel. Threads may run calls at
once: each launch takes a buffer from a pool, which all calls of the kind share.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from typing import Any

from heedful.core.base import evaluated
from heedful.core.base.arrays import item_bytes
from heedful.core.base.device import vendor_of
from heedful.core.base.symbols import Symbol, settled
from heedful.launch.code.artifact import TENSOR_MAP_BYTES, Artifact, map_words
from heedful.launch.compiler import artifact as compile_call
from heedful.launch.compiler import counters, place
from heedful.launch.driver import driver
from heedful.launch.spec import KernelCall, Program, Scalar, TensorMap

# How many encoded tensor maps an argument keeps: addresses recur, since allocators reuse memory.
_MOST_MAPS = 4096
_pack_map = struct.Struct(f"{TENSOR_MAP_BYTES}s").pack_into
_known = dict.get

_DIMS = 3  # of a grid
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}

# (device index, arch, specialization) -> function handle in that device's context.
_functions: dict[tuple, object] = {}


class KernelKind:
    """One kernel of a program, compiled and loaded, for calls that differ only in numbers. Its
    numbers may be symbols."""

    __slots__ = ("fill", "grid", "layout", "maps", "pool", "_new_slot")

    def __init__(
        self,
        call: KernelCall,
        arch: str,
        device: int,
        names: Sequence[str],
        numbers: Sequence[Any],
        begin: int,
    ):
        """names: the buffers' names, in the order of the addresses. numbers: the call's. begin: the
        index of this kernel's first changing number among those of all kernels."""
        artifact = compile_call(call, arch)
        if artifact.scratch_bytes:
            raise RuntimeError(f"{call.kernel.function}: compiler scratch is not supported")
        if artifact.cluster != call.cluster:
            raise RuntimeError(
                f"{call.kernel.function} is compiled for clusters of {artifact.cluster}, "
                f"the launch asks for {call.cluster}"
            )
        loader, key = driver(vendor_of(arch)), (device, arch, call.specialization)
        if key not in _functions:
            try:
                _functions[key] = loader.load(artifact, device)
            except RuntimeError as error:
                raise RuntimeError(f"{error}. {place(call, arch)}") from error
        queued = call.programmatic, call.cooperative
        self._new_slot = partial(loader.Slot, artifact, _functions[key], device, *queued)
        self.grid = slice(begin, begin + 3)
        offsets = {p.name: p.offset for p in artifact.parameters}
        places = {name: names.index(buffer) for name, buffer in _buffers(call).items()}
        pointers = [(offsets[n], places[n]) for n in places if n not in artifact.tensor_maps]
        words, end = map_words(artifact)
        # For each tensor map, in the driver's order: the index of its array among the addresses,
        # and the places in the buffer of the map and of the address in its words.
        self.maps = [(places[name], offsets[name], word) for name, word in words.items()]
        self.layout = artifact.parameter_bytes, pointers, [offset for _, offset, _ in self.maps]
        places_of = {index: begin + n for n, index in enumerate(changing(numbers))}
        fields, image = [], bytearray(end)
        for offset, kind, index in _fields(call, artifact):
            if index in places_of:
                fields.append((offset, kind, places_of[index]))
            else:
                struct.pack_into("<" + kind, image, offset, numbers[index])
        addresses = pointers + [(word, index) for index, _, word in self.maps]
        self.fill = _filler(image, fields, addresses)
        self.pool: list = []

    def take(self):
        """An argument buffer."""
        try:
            return self.pool.pop()
        except IndexError:
            return self._new_slot()

    def run(self, numbers: Sequence[int | float], addresses: Sequence[int], stream: int) -> None:
        """Launches with these numbers on a raw stream; the device must be current."""
        x, y, z = numbers[self.grid]
        if not (x and y and z):
            return
        slot = self.take()
        self.fill(slot.buffer, numbers, addresses)
        slot.set_grid(x, y, z)
        if self.maps:
            slot.encode_all()
        slot.launch(stream)
        self.pool.append(slot)
        counters["launches"] += 1


class Slots:
    """One argument buffer for each of several kernels, which are launched one after the other. One
    thread uses them at a time. owner: the program whose grids they hold."""

    __slots__ = ("buffers", "each", "launches", "owner")

    def __init__(self, each: Sequence[Any]):
        self.each = each
        self.owner: BoundProgram | None = None
        self.buffers = [slot.buffer for slot in each]
        self.launches = [slot.launch for slot in each]


class Together:
    """Kernels of a program that are launched one after the other. One call fills all their
    buffers."""

    __slots__ = ("count", "kernels", "maps", "parts", "pick", "pool", "refill")

    def __init__(self, kernels: Sequence[KernelKind]):
        self.kernels, self.count = kernels, len(kernels)
        # For each tensor map: its kernel, its number there, and places as in KernelKind.maps.
        self.maps = [
            (which, number, index, offset)
            for which, kernel in enumerate(kernels)
            for number, (index, offset, _) in enumerate(kernel.maps)
        ]
        # One more: for a single place itemgetter would not return a tuple.
        self.pick = itemgetter(*[index for _, _, index, _ in self.maps], 0)
        self.refill, self.parts = _refiller([kernel.layout for kernel in kernels])
        self.pool: list[Slots] = []

    def new_slots(self) -> Slots:
        """New argument buffers, for when none are free."""
        return Slots([kernel.take() for kernel in self.kernels])


class BoundProgram:
    """Kernels with all their numbers, which lack only addresses. Many bound programs share a
    kind."""

    __slots__ = ("_encoded", "_kind", "_numbers", "_rest")

    def __init__(self, kind: Together, numbers: Sequence[int | float]):
        """numbers: those of all kernels together. No grid is empty."""
        self._kind, self._numbers = kind, numbers
        # The encoded bytes of each map, by address. A look-up takes a tenth of the driver's time
        # for encoding.
        self._encoded: list[dict[int, bytes]] = [{} for _ in kind.maps]
        # The bytes of buffers between addresses and maps.
        self._rest: list[bytes] | None = None

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Launches on a raw stream; the device must be current."""
        kind, rest, maps = self._kind, self._rest, ()
        if self._encoded:
            maps = [*map(_known, self._encoded, kind.pick(addresses))]
            if not all(maps):
                rest = None
        try:
            slots = kind.pool.pop()
        except IndexError:
            slots = kind.new_slots()
        if rest is None:
            self._fill(slots, addresses, maps)
        else:
            kind.refill(slots.buffers, rest, addresses, maps)
        if slots.owner is not self:
            for kernel, slot in zip(kind.kernels, slots.each, strict=True):
                slot.set_grid(*self._numbers[kernel.grid])
            slots.owner = self
        for launch in slots.launches:
            launch(stream)
        kind.pool.append(slots)
        counters["launches"] += kind.count

    def _fill(self, slots: Slots, addresses: Sequence[int], maps: Sequence[bytes | None]) -> None:
        """Fills buffers, whatever they held before, and encodes maps that are not kept."""
        kind, buffers = self._kind, slots.buffers
        for kernel, buffer in zip(kind.kernels, buffers, strict=True):
            kernel.fill(buffer, self._numbers, addresses)
        if self._rest is None:
            self._rest = [buffers[which][begin:end] for which, begin, end in kind.parts]
        for encoded, known, (which, number, index, offset) in zip(
            maps, self._encoded, kind.maps, strict=True
        ):
            if encoded is not None:
                _pack_map(buffers[which], offset, encoded)
                continue
            if len(known) >= _MOST_MAPS:
                known.clear()
            slots.each[which].encode(number)
            known[addresses[index]] = buffers[which][offset : offset + TENSOR_MAP_BYTES]


def _nothing(*_) -> None:
    """Runs a program all of whose grids are empty."""


class ProgramKind:
    """Every kernel of a program, for calls that differ in numbers alone. Compiles and loads on
    construction."""

    __slots__ = ("_kernels", "_together")

    def __init__(
        self,
        program: Program,
        arch: str,
        device: int,
        names: Sequence[str],
        numbers: Sequence[Sequence[Any]],
        before: int = 0,
    ):
        """numbers: those of each kernel, as from `numbers_of`. before: how many other numbers
        precede them in a call."""
        self._kernels: list[KernelKind] = []
        for call, call_numbers in zip(program.calls, numbers, strict=True):
            self._kernels.append(KernelKind(call, arch, device, names, call_numbers, before))
            before += len(changing(call_numbers))
        # By which kernels have a grid that is not empty.
        self._together: dict[tuple[bool, ...], Together] = {}

    def bind(self, numbers: Sequence[int | float]) -> Callable[[Sequence[int], int], None]:
        """A function that launches the kernels with these numbers, on addresses and a stream: see
        BoundProgram.run."""
        busy = tuple([0 not in numbers[kind.grid] for kind in self._kernels])
        if not any(busy):
            return _nothing
        kind = self._together.get(busy)
        if kind is None:
            kind = self._together.setdefault(busy, Together([*compress(self._kernels, busy)]))
        return BoundProgram(kind, numbers).run

    def run(self, numbers: Sequence[int | float], addresses: Sequence[int], stream: int) -> None:
        """Launches all kernels and keeps nothing, for numbers that come only once."""
        for kernel in self._kernels:
            kernel.run(numbers, addresses, stream)


def numbers_of(call: KernelCall) -> list[Any]:
    """All numbers of a launch: the grid; then, in the order of the arguments, each scalar, and each
    tensor map's shape, strides, and strides in bytes without the last. Numbers that are the same
    for all calls of a case are not symbols."""
    numbers: list[Any] = [*call.grid]
    for argument in call.arguments.values():
        match argument:
            case Scalar(value=value):
                numbers.append(value)
            case TensorMap(dtype=dtype, shape=shape, strides=strides):
                item = item_bytes(dtype)
                numbers += (*shape, *strides, *[stride * item for stride in strides[:-1]])
    return settled(numbers)


def changing(numbers: Sequence[Any]) -> list[int]:
    """The places of the grid and of those numbers that differ between calls of a case. The others
    are packed once, since each value takes time."""
    return [i for i, number in enumerate(numbers) if i < _DIMS or isinstance(number, Symbol)]


def _buffers(call: KernelCall) -> dict[str, str]:
    """The buffer of each argument that is an address or a tensor map."""
    return {name: a.buffer for name, a in call.arguments.items() if not isinstance(a, Scalar)}


def _fields(call: KernelCall, artifact: Artifact) -> list[tuple[int, str, int]]:
    """(offset in the buffer, format, place among the call's numbers)."""
    index = _DIMS
    words, _ = map_words(artifact)
    formats = {
        p.name: (p.offset, _FORMATS[p.type]) for p in artifact.parameters if p.type in _FORMATS
    }
    fields: list[tuple[int, str, int]] = []
    for name, argument in call.arguments.items():
        match argument:
            case Scalar():
                fields.append((*formats[name], index))
                index += 1
            case TensorMap(shape=shape):
                rank = len(shape)
                for i in range(rank):
                    fields.append((*formats[f"{name}.shape[{i}]"], index + i))
                    fields.append((*formats[f"{name}.strides[{i}]"], index + rank + i))
                # Innermost first, after the address: sizes, then steps.
                inward = [index + i for i in reversed(range(rank))]
                inward += [index + 2 * rank + i for i in reversed(range(rank - 1))]
                first = words[name] + 8
                fields += [(first + 8 * n, "q", place) for n, place in enumerate(inward)]
                index += 3 * rank - 1
    return fields


def _filler(
    image: bytearray, numbers: list[tuple[int, str, int]], addresses: list[tuple[int, int]]
) -> Callable[[Any, Sequence[int | float], Sequence[int]], None]:
    """A function (buffer, numbers, addresses) that fills the buffer with the image, these numbers
    and these addresses. numbers: offset, format and index of each. addresses: offset and index of
    each.
    """
    fields = [(offset, kind, f"numbers[{place}]") for offset, kind, place in numbers]
    fields += [(offset, "Q", f"addresses[{place}]") for offset, place in addresses]
    layout, values, position = "<", "", 0
    for offset, kind, value in (*sorted(fields), (len(image), "", "")):
        between = bytes(image[position:offset])
        layout += f"{len(between)}{'s' if any(between) else 'x'}{kind}"
        values += f", {between}" * any(between) + f", {value}"
        position = offset + struct.calcsize("<" + kind)
    # As generated code, which takes less time than collecting the values in a list.
    line = f"return pack_into(buffer, 0{values})"
    scope = {"pack_into": struct.Struct(layout).pack_into}
    return evaluated.function("buffer, numbers, addresses", [line], scope)


# The layout of a kernel's buffer: its end; the offset of each pointer, and its index among the
# addresses; the offsets of maps.
_Layout = tuple[int, list[tuple[int, int]], list[int]]


def _refiller(layouts: Sequence[_Layout]) -> tuple[Callable[..., None], list[tuple[int, int, int]]]:
    """A function (buffers, rest, addresses, maps) that fills the buffers; and, for each piece of
    `rest`, the bytes between addresses and maps: the index of its buffer, its start and its end."""
    calls, parts, count = [], [], 0
    scope = {}
    for which, (end, pointers, maps) in enumerate(layouts):
        fields = [(offset, 8, "Q", f"addresses[{place}]") for offset, place in pointers]
        fields += [
            (offset, TENSOR_MAP_BYTES, f"{TENSOR_MAP_BYTES}s", f"maps[{index}]")
            for index, offset in enumerate(maps, count)
        ]
        count += len(maps)
        layout, values, position = "<", "", 0
        for offset, size, kind, value in (*sorted(fields), (end, 0, "", "")):
            if offset > position:
                values += f", rest[{len(parts)}]"
                layout += f"{offset - position}s"
                parts.append((which, position, offset))
            layout += kind
            values += f", {value}"
            position = offset + size
        scope[f"pack_{which}"] = struct.Struct(layout).pack_into
        calls.append(f"pack_{which}(buffers[{which}], 0{values})")
    return evaluated.function("buffers, rest, addresses, maps", calls, scope), parts
