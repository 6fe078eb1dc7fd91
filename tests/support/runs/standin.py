"""A stand-in for a GPU: the public functions on CPU tensors run through the real GPU runner, down
to the driver, which is a stub.

    with standin.gpu("H200") as gpu:
        heedful.flash_attn_func(q, k, v)
    gpu.launches[-1]          # see support.launches for its arguments by name

The stub records every launch: the packed argument buffer read back as the driver would read it,
grid, stream, options. With `interprets=True` it also runs the portable kernel, in Triton's
interpreter (see `support.runs.interpreted`), on the memory at the addresses that the buffer holds.
What is recorded only computes nothing: outputs keep the poison that all new memory is filled with.
"""

import ctypes
import importlib
import pkgutil
import re
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

import torch

import heedful.torch
from heedful.core.base.arrays import item_bytes
from heedful.core.base.device import by_name
from heedful.core.registry import configs
from heedful.core.registry.capability import Toolchain
from heedful.core.registry.tiles import DecodeConfig, TileConfig
from heedful.launch.code.artifact import Artifact, lay_out, map_words
from heedful.launch.program import bound
from heedful.launch.spec import (
    TRITON_TYPES,
    KernelCall,
    KernelRef,
    Pointer,
    Scalar,
    TensorMap,
    leaves,
    map_leaves,
    promise,
)
from heedful.torch.api.merge import MERGES
from heedful.torch.base import device
from heedful.torch.eager import backends, cache_step, execute, zeros
from heedful.torch.eager.calls import CALLS, KINDS, LATEST
from heedful.torch.eager.slots import APPENDS, SLOTS
from support.runs.interpreter import run_call

# A machine without kernels of its own vendor's kind: the portable ones are its first choice.
PORTABLE_GPU = "B200"
_FORMATS = {"i1": "<?", "i8": "<b", "u8": "<B", "i32": "<i", "i64": "<q", "fp32": "<f"}
_DTYPES = {ours: theirs for theirs, ours in TRITON_TYPES.items() if theirs != "int4"}
_MODULES = (execute, backends, cache_step, device)
# Where kernels read the second axis of their grid: the parts of keys. None reads the third.
_OF_PARTS = ("heedful.kernels.portable.forward.", "heedful.kernels.cdna.")


@dataclass(frozen=True)
class Map:
    """A tensor map as its bytes in the argument buffer say: elements, outermost dim first."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One launch as the driver saw it.

    arguments: parameter -> its value in the buffer: a number, an address, or a Map.
    memory: parameters that are addresses or maps. promises: what the compiler was told that each is
    a multiple of. constants: compile-time values, None for absent operands. options: of the
    compiler. cluster, programmatic, cooperative: as KernelCall's.
    """

    kernel: KernelRef
    grid: tuple[int, int, int]
    stream: int
    arguments: dict[str, Any]
    memory: frozenset[str]
    types: dict[str, str]
    promises: dict[str, int]
    constants: dict[str, Any]
    options: dict[str, Any]
    device: Any
    thread: int
    cluster: int
    programmatic: bool
    cooperative: bool


@dataclass(frozen=True)
class _Code(Artifact):
    """An artifact that is not compiled, with what it would be compiled from."""

    call: KernelCall | None = None


@dataclass
class Gpu:
    """The machine, and the driver that its launches go to.

    launches: all so far. vendors: whose drivers were asked for. stream: the current one's handle.
    capturing: whether a graph is captured. loads: artifacts loaded. encoded: maps encoded, in
    order.
    """

    interprets: bool = False
    stream: int = 0
    capturing: bool = False
    launches: list[Launch] = field(default_factory=list)
    loads: list[Artifact] = field(default_factory=list)
    vendors: set[str] = field(default_factory=set)
    encoded: list[Map] = field(default_factory=list)
    before_launch: Any = None
    _lock: Any = field(default_factory=threading.RLock)

    def driver(self, vendor: str) -> "Gpu":
        self.vendors.add(vendor)
        return self

    def compile(self, call: KernelCall, arch: str) -> Artifact:
        """An artifact laid out as the compiler lays it out, in the kernel function's own order."""
        names = _parameters(call.kernel)
        given = set(call.parameters)
        assert given == set(names), f"{call.kernel.function}: {sorted(given ^ set(names))}"
        in_order = [leaf for name in names for leaf, *_ in leaves(name, call.parameters[name])]
        order = [name for name in in_order if name in call.arguments]
        maps = {n: a for n, a in call.arguments.items() if isinstance(a, TensorMap)}
        for argument in maps.values():
            _assert_layout_of_box(argument)
        types = [(name, call.arguments[name].type) for name in order]
        parameters, size = lay_out(types, {name: len(a.shape) for name, a in maps.items()})
        metas = {
            name: {"elem_size": item_bytes(a.dtype), "block_size": list(a.block)}
            for name, a in maps.items()
        }
        return _Code(
            code=b"",
            text="",
            symbol=call.kernel.function,
            target=arch,
            num_warps=4,
            warp_size=32,
            shared_bytes=0,
            cluster=call.cluster,
            parameters=tuple(parameters),
            parameter_bytes=size,
            tensor_maps=metas,
            call=call,
        )

    def load(self, artifact: Artifact, index) -> Artifact:
        self.loads.append(artifact)
        return artifact

    def Slot(self, artifact, function, index, programmatic, cooperative):
        return _Slot(self, artifact, index, (programmatic, cooperative))

    def take(self, code: _Code, index, grid, buffer: bytes, stream: int, queued: tuple[bool, bool]):
        """A launch: reads the buffer, records it, and runs the kernel if that is asked for."""
        arguments, types = {}, {}
        for parameter in code.parameters:
            types[parameter.name] = parameter.type
            arguments[parameter.name] = self._read(parameter, buffer)
        assert code.call is not None
        call = code.call
        promises = {name: promise(argument) for name, argument in call.arguments.items()}
        for name, promised in promises.items():
            value = arguments[name]
            assert promised == 1 or value % promised == 0, (
                f"{name} {value}: no multiple of {promised}"
            )
        axes = 2 if call.kernel.module.startswith(_OF_PARTS) else 1
        assert all(size == 1 for size in grid[axes:]), f"programs that do the same: {tuple(grid)}"
        memory = {n for n, kind in types.items() if kind[0] == "*" or kind == "tensormap"}
        launch = Launch(
            call.kernel,
            tuple(grid),
            stream,
            arguments,
            frozenset(memory),
            types,
            promises,
            dict(call.constants),
            dict(call.options),
            index,
            threading.get_ident(),
            code.cluster,
            *queued,
        )
        with self._lock:
            self.launches.append(launch)
            if self.interprets:
                _interpret(call, launch)

    def _read(self, parameter, buffer: bytes):
        if parameter.type == "tensormap":
            (number,) = struct.unpack_from("<Q", buffer, parameter.offset)
            # Nothing was encoded into a map's place where the number is 0.
            return self.encoded[number - 1] if number else None
        kind = "<Q" if parameter.type[0] == "*" else _FORMATS[parameter.type]
        return struct.unpack_from(kind, buffer, parameter.offset)[0]


class _Slot:
    """The argument buffer of one launch, as the drivers' own."""

    def __init__(self, gpu: Gpu, code, index, queued: tuple[bool, bool]):
        self._words, size = map_words(code)
        self.buffer = ctypes.create_string_buffer(b"\xff" * size, size)
        self._gpu, self._code, self._index = gpu, code, index
        self._queued = queued

    def set_grid(self, x: int, y: int, z: int) -> None:
        self._grid = x, y, z

    def encode(self, number: int) -> None:
        """A tensor map is the number of what was encoded, from 1."""
        (name, word), gpu = [*self._words.items()][number], self._gpu
        meta = self._code.tensor_maps[name]
        rank, item = len(meta["block_size"]), meta["elem_size"]
        address, *inward = struct.unpack_from(f"<Q{2 * rank - 1}q", self.buffer, word)
        shape, steps = inward[:rank][::-1], inward[rank:][::-1]
        strides = *(step // item for step in steps), 1
        (place,) = (p.offset for p in self._code.parameters if p.name == name)
        with gpu._lock:
            gpu.encoded.append(Map(address, tuple(shape), strides, tuple(meta["block_size"])))
            struct.pack_into("<Q120x", self.buffer, place, len(gpu.encoded))

    def encode_all(self) -> None:
        for number in range(len(self._words)):
            self.encode(number)

    def launch(self, stream: int) -> None:
        if self._gpu.before_launch is not None:
            self._gpu.before_launch(self)
        buffer = self.buffer.raw[: self._code.parameter_bytes]
        self._gpu.take(self._code, self._index, self._grid, buffer, stream, self._queued)


def _assert_layout_of_box(argument: TensorMap) -> None:
    """AssertionError unless the layout in shared memory is that of the map's own box: of its rank
    and element type, swizzled over as much of a row of it as 128 bytes hold; not over
    16 bytes, the least that a swizzle moves."""
    given = dict(re.findall(r"(\w+)=(\w+)", argument.layout))
    bits = 8 * getattr(torch, argument.dtype).itemsize
    assert argument.layout.startswith("NVMMASharedLayout("), argument
    assert int(given["rank"]) == len(argument.block), argument
    assert int(given["element_bitwidth"]) == bits, argument
    width = min(128, argument.block[-1] * bits // 8)
    assert int(given["swizzle_byte_width"]) == (width if width > 16 else 0), argument


def _parameters(ref: KernelRef) -> list[str]:
    return list(getattr(importlib.import_module(ref.module), ref.function).arg_names)


def _interpret(call: KernelCall, launch: Launch) -> None:
    """Runs the kernel on the memory at the launch's addresses, with the numbers that were read."""
    if 0 in launch.grid:
        return

    def read(name: str, leaf: object, _path) -> object:
        """The leaf as the argument buffer says; an address is named by itself."""
        if isinstance(leaf, Pointer):
            return replace(leaf, buffer=name)
        return replace(leaf, value=launch.arguments[name]) if isinstance(leaf, Scalar) else leaf

    pointers = (name for name, leaf in call.arguments.items() if isinstance(leaf, Pointer))
    arrays = {name: _pointer(launch.types[name], launch.arguments[name]) for name in pointers}
    parameters = {name: map_leaves(name, x, read) for name, x in call.parameters.items()}
    run_call(replace(call, parameters=parameters, grid=launch.grid), arrays, are_whole=False)


def _pointer(kind: str, address: int) -> torch.Tensor:
    """A tensor that begins at an address: the interpreter asks it for no more than that."""
    dtype = getattr(torch, _DTYPES[kind[1:]])
    if address == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(address), dtype=dtype)


def _poisoned(shape, dtype, where, strides=None):
    """Makes dense tensors full of bytes 0xFF: NaN, or -1. strides: by default of contiguous
    ones."""

    def make() -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=where)
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor if strides is None else tensor.as_strided(shape, strides)

    return make


@contextmanager
def gpu(
    name: str = "", interprets: bool = False, tiles: tuple[int, int] | None = None
) -> Iterator[Gpu]:
    """While it is open, CPU tensors are this GPU's (a known device's name; by default one that the
    portable kernels serve). tiles: of every kernel that has such, in place of the tuned ones."""
    machine, spec = Gpu(interprets), by_name(name or PORTABLE_GPU)
    stand_ins = {
        "device_spec": lambda _: spec,
        "toolchain": lambda _=None: Toolchain(),
        "current_device": lambda: None,
        "raw_stream": lambda _: machine.stream,
        "_is_capturing": lambda: machine.capturing,
        "maker": lambda where: (
            lambda shape, strides, dtype: _poisoned(shape, dtype, where, strides)()
        ),
    }
    with ExitStack() as stack:

        def put(owner, attribute, value):
            stack.enter_context(mock.patch.object(owner, attribute, value))

        for module in (*_MODULES, *_modules()):
            for attribute, value in stand_ins.items():
                if attribute in vars(module) and vars(module)[attribute] is not value:
                    put(module, attribute, value)
        put(torch.cuda, "device", lambda _: nullcontext())
        put(bound, "driver", machine.driver)
        put(bound, "compile_call", machine.compile)
        put(bound, "_functions", {})
        put(zeros, "_of_stream", {})
        put(zeros, "_lasting", {})
        put(zeros, "finish", lambda _: None)
        put(zeros, "unpooled", lambda nbytes, where: _poisoned((nbytes,), torch.uint8, where)())
        if tiles is not None:
            put(configs, "choose", _with_tiles(configs.choose, TileConfig(*tiles)))
        for known in (APPENDS, CALLS, KINDS, LATEST, MERGES, SLOTS, backends.FAMILIES):
            known.clear()
            stack.callback(known.clear)
        yield machine


def _with_tiles(choose, tiles: TileConfig):
    def chosen(kernel, problem, spec):
        made = choose(kernel, problem, spec)
        has_own = isinstance(made.config, DecodeConfig)
        return made if has_own else replace(made, config=tiles)

    return chosen


@cache
def _modules() -> list[Any]:
    """All modules of heedful.torch, which load now: one that loads while names are replaced would
    keep what replaces them."""
    for found in pkgutil.walk_packages(heedful.torch.__path__, "heedful.torch."):
        importlib.import_module(found.name)
    found = [module for name, module in sys.modules.items() if name.startswith("heedful.torch.")]
    return [module for module in found if module not in _MODULES]
