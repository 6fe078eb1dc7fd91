"""A program bound to a device: loaded kernels, and the numbers of their argument buffers.

What is compiled, loaded and worked out about a buffer's layout is of a kind; numbers alone differ
between calls of a kind, and not all of them: the rest lies in an image of the buffer. A call that
comes but once packs all of a buffer at once and keeps nothing. One that comes again is bound to its
numbers: running it costs, per kernel, packing the addresses and one driver call. Safe under
threads: each launch takes a buffer of its own from a pool, which all calls of the kind share.
"""

import struct
from collections.abc import Callable, Sequence
from copy import copy
from operator import itemgetter
from typing import Any

from heedful.core.arrays import item_bytes
from heedful.core.device import vendor_of
from heedful.core.symbols import Symbol, settled
from heedful.launch.artifact import TENSOR_MAP_BYTES, Artifact, map_words
from heedful.launch.compiler import artifact as compile_call
from heedful.launch.compiler import counters
from heedful.launch.driver import driver
from heedful.launch.spec import KernelCall, Program, Scalar, TensorMap

# Encoded tensor maps that one argument keeps: a call's addresses recur, as allocators reuse memory.
_MOST_MAPS = 4096
_pack_map = struct.Struct(f"{TENSOR_MAP_BYTES}s").pack_into
_known = dict.get

_DIMS = 3  # of a grid
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}

# (device index, arch, variant) -> function handle in that device's context.
_functions: dict[tuple, object] = {}


class KernelKind:
    """One kernel of a program, compiled and loaded, for calls that differ in numbers alone: its
    lengths may be symbols."""

    # Of a copy, too, attributes are found fast.
    __slots__ = (
        "artifact",
        "fill",
        "grid",
        "maps",
        "parts",
        "pick",
        "pool",
        "refill",
        "_addresses",
        "_device",
        "_driver",
        "_fields",
        "_function",
        "_image",
        "_queued",
    )

    def __init__(
        self,
        call: KernelCall,
        arch: str,
        device: int,
        names: Sequence[str],
        numbers: Sequence[Any],
        begin: int,
    ):
        """names: of buffers, in the order of the addresses. numbers: of the call. begin: where
        those that change begin among all that do."""
        self.artifact = artifact = compile_call(call, arch)
        if artifact.scratch_bytes:
            raise RuntimeError(f"{call.kernel.function}: compiler scratch is not supported")
        if artifact.cluster != call.cluster:
            raise RuntimeError(
                f"{call.kernel.function} is compiled for clusters of {artifact.cluster}, "
                f"the launch asks for {call.cluster}"
            )
        self._driver = driver(vendor_of(arch))
        key = (device, arch, call.variant)
        if key not in _functions:
            _functions[key] = self._driver.load(artifact, device)
        self._function, self._device = _functions[key], device
        self._queued = call.programmatic, call.cooperative
        self.grid = slice(begin, begin + 3)
        offsets = {p.name: p.offset for p in artifact.parameters}
        places = {name: names.index(buffer) for name, buffer in _buffers(call).items()}
        pointers = [(offsets[n], places[n]) for n in places if n not in artifact.tensor_maps]
        words, end = map_words(artifact)
        # Of each tensor map, in the driver's order: places of its array among the addresses, of
        # the map in the buffer, and of the address that it is encoded from.
        self.maps = [(places[name], offsets[name], word) for name, word in words.items()]
        self.pick = _getter([index for index, *_ in self.maps])
        maps = [offset for _, offset, _ in self.maps]
        self.refill, self.parts = _refiller(artifact.parameter_bytes, pointers, maps)
        places_of = {index: begin + n for n, index in enumerate(_changing(numbers))}
        self._fields, self._image = [], bytearray(end)
        for offset, kind, index in _fields(call, artifact):
            if index in places_of:
                self._fields.append((offset, kind, places_of[index]))
            else:
                struct.pack_into("<" + kind, self._image, offset, numbers[index])
        self._addresses = pointers + [(word, index) for index, _, word in self.maps]
        self.fill = _filler(self._image, self._fields, self._addresses)
        self.pool: list = []

    def narrowed(self, numbers: Sequence[Any]) -> "KernelKind":
        """The same kernel for some of its calls. numbers: all of them, plain ones where these are
        the same for those calls."""
        other = copy(self)
        other._fields, other._image = [], bytearray(self._image)
        for offset, kind, place in self._fields:
            if isinstance(numbers[place], Symbol):
                other._fields.append((offset, kind, place))
            else:
                struct.pack_into("<" + kind, other._image, offset, numbers[place])
        other.fill = _filler(other._image, other._fields, self._addresses)
        return other

    def new_slot(self):
        """An argument buffer, where none is free."""
        return self._driver.Slot(self.artifact, self._function, self._device, *self._queued)

    def run(self, numbers: Sequence[int | float], addresses: Sequence[int], stream: int) -> None:
        """Launches with these on a raw stream; the device must be current."""
        x, y, z = numbers[self.grid]
        if not (x and y and z):
            return
        try:
            slot = self.pool.pop()
        except IndexError:
            slot = self.new_slot()
        slot.owner = None
        self.fill(slot.buffer, numbers, addresses)
        slot.set_grid(x, y, z)
        if self.maps:
            slot.encode_all()
        slot.launch(stream)
        self.pool.append(slot)
        counters["launches"] += 1


class BoundKernel:
    """A kernel with all its numbers: everything but addresses. Many share a kind."""

    __slots__ = ("_encoded", "_grid", "_kind", "_numbers", "_rest")

    def __init__(self, kind: KernelKind, numbers: Sequence[int | float]):
        """numbers: all that the kind takes its own from."""
        grid = numbers[kind.grid]
        self._kind, self._numbers = kind, numbers
        self._grid = None if 0 in grid else grid
        # Of each map, by address. Encoding asks the driver, which takes ten times as long as
        # looking up what it said.
        self._encoded: list[dict[int, bytes]] = [{} for _ in kind.maps]
        # What a buffer holds between addresses and maps.
        self._rest: list[bytes] | None = None

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Launches on a raw stream; the device must be current."""
        if self._grid is None:
            return
        kind, rest, maps = self._kind, self._rest, ()
        if self._encoded:
            maps = [*map(_known, self._encoded, kind.pick(addresses))]
            if not all(maps):
                rest = None
        try:
            slot = kind.pool.pop()
        except IndexError:
            slot = kind.new_slot()
        if rest is None:
            self._fill(slot, addresses, maps)
        else:
            kind.refill(slot.buffer, rest, addresses, maps)
        if slot.owner is not self:
            slot.set_grid(*self._grid)
            slot.owner = self
        slot.launch(stream)
        kind.pool.append(slot)
        counters["launches"] += 1

    def _fill(self, slot, addresses: Sequence[int], maps: Sequence[bytes | None]) -> None:
        """Fills a buffer wherever it was before, and encodes the maps that are not known."""
        kind, buffer = self._kind, slot.buffer
        kind.fill(buffer, self._numbers, addresses)
        if self._rest is None:
            self._rest = [buffer[begin:end] for begin, end in kind.parts]
        for number, (index, offset, _) in enumerate(kind.maps):
            encoded, known = maps[number], self._encoded[number]
            if encoded is not None:
                _pack_map(buffer, offset, encoded)
                continue
            if len(known) >= _MOST_MAPS:
                known.clear()
            slot.encode(number)
            known[addresses[index]] = buffer[offset : offset + TENSOR_MAP_BYTES]


class ProgramKind:
    """Every kernel of a program, for calls that differ in numbers alone. Compiles and loads on
    construction."""

    __slots__ = ("_kernels",)

    def __init__(
        self,
        program: Program,
        arch: str,
        device: int,
        names: Sequence[str],
        numbers: Sequence[Sequence[Any]],
        before: int = 0,
    ):
        """numbers: of each kernel, as `numbers_of` has them. before: how many come before what
        changes of these."""
        self._kernels: list[KernelKind] = []
        for call, own in zip(program.calls, numbers, strict=True):
            self._kernels.append(KernelKind(call, arch, device, names, own, before))
            before += len(changing(own))

    def narrowed(self, numbers: Sequence[Any]) -> "ProgramKind":
        """The same program for some of its calls. numbers: see KernelKind.narrowed."""
        other = copy(self)
        other._kernels = [kind.narrowed(numbers) for kind in self._kernels]
        return other

    def bind(self, numbers: Sequence[int | float]) -> list[BoundKernel]:
        """The kernels with their numbers, those of each call after those of the one before."""
        return [BoundKernel(kind, numbers) for kind in self._kernels]

    def run(self, numbers: Sequence[int | float], addresses: Sequence[int], stream: int) -> None:
        """Launches all kernels and keeps nothing, for numbers that come but once."""
        for kernel in self._kernels:
            kernel.run(numbers, addresses, stream)


def numbers_of(call: KernelCall) -> list[Any]:
    """All that a launch's buffer and grid hold but addresses: the grid, then each number and each
    tensor map's shape, strides, and strides in bytes without the last, in the order of the
    arguments. Those that are the same for all calls of its case are no symbols."""
    numbers: list[Any] = [*call.grid]
    for argument in call.arguments.values():
        match argument:
            case Scalar(value=value):
                numbers.append(value)
            case TensorMap(dtype=dtype, shape=shape, strides=strides):
                item = item_bytes(dtype)
                numbers += (*shape, *strides, *[stride * item for stride in strides[:-1]])
    return settled(numbers)


def changing(numbers: Sequence[Any]) -> list[Any]:
    """Of a kernel's numbers the grid and what differs between calls of its case. The rest is packed
    once: each value takes its time."""
    return [numbers[index] for index in _changing(numbers)]


def _changing(numbers: Sequence[Any]) -> list[int]:
    return [i for i, number in enumerate(numbers) if i < _DIMS or isinstance(number, Symbol)]


def _buffers(call: KernelCall) -> dict[str, str]:
    """The buffer of each argument that is an address or a tensor map."""
    return {name: a.buffer for name, a in call.arguments.items() if not isinstance(a, Scalar)}


def _fields(call: KernelCall, artifact: Artifact) -> list[tuple[int, str, int]]:
    """(offset in the buffer, format, place among the call's numbers)."""
    at = _DIMS
    words, _ = map_words(artifact)
    formats = {
        p.name: (p.offset, _FORMATS[p.type]) for p in artifact.parameters if p.type in _FORMATS
    }
    found: list[tuple[int, str, int]] = []
    for name, argument in call.arguments.items():
        match argument:
            case Scalar():
                found.append((*formats[name], at))
                at += 1
            case TensorMap(shape=shape):
                rank = len(shape)
                for i in range(rank):
                    found.append((*formats[f"{name}.shape[{i}]"], at + i))
                    found.append((*formats[f"{name}.strides[{i}]"], at + rank + i))
                # Innermost first, behind the address: sizes, then steps.
                inward = [at + i for i in reversed(range(rank))]
                inward += [at + 2 * rank + i for i in reversed(range(rank - 1))]
                first = words[name] + 8
                found += [(first + 8 * n, "q", place) for n, place in enumerate(inward)]
                at += 3 * rank - 1
    return found


def _filler(
    image: bytearray, numbers: list[tuple[int, str, int]], addresses: list[tuple[int, int]]
) -> Callable[[Any, Sequence[int | float], Sequence[int]], None]:
    """(buffer, numbers, addresses) -> the whole buffer is like the image, with some of these in it.

    numbers: offset, format and place of each. addresses: offset and place of each.
    """
    fields = [(offset, kind, f"numbers[{place}]") for offset, kind, place in numbers]
    fields += [(offset, "Q", f"addresses[{place}]") for offset, place in addresses]
    layout, values, position = "<", "", 0
    for offset, kind, value in (*sorted(fields), (len(image), "", "")):
        between = bytes(image[position:offset])
        layout += f"{len(between)}{'s' if any(between) else 'x'}{kind}"
        values += f", {between}" * any(between) + f", {value}" * bool(kind)
        position = offset + struct.calcsize("<" + kind)
    # As code, which takes less time than putting together what is packed.
    code = f"lambda buffer, numbers, addresses: pack_into(buffer, 0{values})"
    return eval(code, {"pack_into": struct.Struct(layout).pack_into})


def _refiller(
    end: int, pointers: list[tuple[int, int]], maps: list[int]
) -> tuple[Callable[..., None], list[tuple[int, int]]]:
    """(buffer, rest, addresses, maps) -> the buffer up to `end`, which says all that a launch
    reads; and of `rest`, which lies between what changes, where it begins and ends.

    pointers: offset of each and place among the addresses. maps: offset of each.
    """
    fields = [(offset, 8, "Q", f"addresses[{place}]") for offset, place in pointers]
    fields += [
        (offset, TENSOR_MAP_BYTES, f"{TENSOR_MAP_BYTES}s", f"maps[{index}]")
        for index, offset in enumerate(maps)
    ]
    layout, values, position, parts = "<", "", 0, []
    for offset, size, kind, value in (*sorted(fields), (end, 0, "", "")):
        if offset > position:
            values += f", rest[{len(parts)}]"
            layout += f"{offset - position}s"
            parts.append((position, offset))
        layout += kind
        values += f", {value}" * bool(kind)
        position = offset + size
    code = f"lambda buffer, rest, addresses, maps: pack_into(buffer, 0{values})"
    return eval(code, {"pack_into": struct.Struct(layout).pack_into}), parts


def _getter(indices: list[int]):
    """Picks items as a sequence, one item or none included."""
    if len(indices) > 1:
        return itemgetter(*indices)
    begin = indices[0] if indices else 0
    return itemgetter(slice(begin, begin + len(indices)))
