"""A program bound to a device: loaded kernels with argument buffers filled in but for addresses.

Running it costs, per kernel, packing the addresses and one driver call. Safe under threads: each
launch takes a buffer of its own from a pool.
"""

import struct
from collections.abc import Sequence
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

_FORMATS = {"i1": "<?", "i32": "<i", "i64": "<q", "fp32": "<f"}

# (device index, arch, variant) -> function handle in that device's context.
_functions: dict[tuple, object] = {}


class BoundKernel:
    """One kernel of a program. `names`: the order in which run() is given buffer addresses."""

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
        self._function = _functions[key]
        self._call, self._device, self._empty = call, device, 0 in call.grid
        self._template = _template(call, self.artifact)
        offsets = {p.name: p.offset for p in self.artifact.parameters}
        pointers = sorted(
            (offsets[name], names.index(a.buffer))
            for name, a in call.arguments.items()
            if isinstance(a, Pointer)
        )
        self._runs = [
            (struct.Struct(f"<{len(run)}Q").pack_into, run[0][0], _getter([i for _, i in run]))
            for run in _contiguous(pointers)
        ]
        # Encoding asks the driver, which takes ten times as long as looking up what it said.
        self._maps = [
            (
                {},
                self._driver.TensorMapEncoder(self.artifact.tensor_maps[name], a.shape, a.strides),
                offsets[name],
                names.index(a.buffer),
            )
            for name, a in call.arguments.items()
            if isinstance(a, TensorMap)
        ]
        self._pool: list = []

    def _take(self):
        """A free argument buffer. Another thread may empty the pool between look and take."""
        while self._pool:
            try:
                return self._pool.pop()
            except IndexError:
                continue
        return self._driver.Slot(
            self.artifact,
            self._function,
            self._device,
            self._call.grid,
            self._template,
            self._call.programmatic,
        )

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Launches on a raw stream; the device must be current."""
        if self._empty:
            return
        slot = self._take()
        for pack_into, offset, pick in self._runs:
            pack_into(slot.buffer, offset, *pick(addresses))
        for known, encoder, offset, index in self._maps:
            address = addresses[index]
            encoded = known.get(address)
            if encoded is None:
                if len(known) >= _MOST_MAPS:
                    known.clear()
                encoded = known[address] = encoder.encode(address)
            _pack_map(slot.buffer, offset, encoded)
        slot.launch(stream)
        self._pool.append(slot)
        counters["launches"] += 1


class BoundProgram:
    """Every kernel of a program in order. Compiles and loads on construction."""

    def __init__(self, program: Program, arch: str, device: int, names: Sequence[str]):
        self.kernels = [BoundKernel(call, arch, device, names) for call in program.calls]

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Launches all kernels on a raw stream with the addresses of the named buffers."""
        for kernel in self.kernels:
            kernel.run(addresses, stream)


def _template(call: KernelCall, artifact: Artifact) -> bytes:
    """The argument buffer with every scalar in place and every address zero."""
    template = bytearray(artifact.parameter_bytes)
    offsets = {p.name: (p.offset, p.type) for p in artifact.parameters}
    for name, argument in call.arguments.items():
        match argument:
            case Scalar(value=value):
                offset, kind = offsets[name]
                struct.pack_into(_FORMATS[kind], template, offset, value)
            case TensorMap(shape=shape, strides=strides):
                for part, values, kind in (("shape", shape, "<i"), ("strides", strides, "<q")):
                    for i, value in enumerate(values):
                        struct.pack_into(kind, template, offsets[f"{name}.{part}[{i}]"][0], value)
    return bytes(template)


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
