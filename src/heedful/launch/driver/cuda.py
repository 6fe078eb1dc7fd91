"""CUDA's driver API through ctypes: modules, launches, tensor maps.

Calls hold the GIL (PyDLL): each takes about a microsecond and none waits for the device.
"""

import ctypes
import os
import struct
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache

from heedful.launch.code.artifact import TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES, Artifact, map_words
from heedful.launch.driver.forked import FORKED

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC = 2, 4, 6
BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 0  # CU_LAUNCH_PARAM_*
# CU_DEVICE_ATTRIBUTE_*: what the planner wants to know.
_FIGURES = {"units": 16, "shared_bytes": 97, "l2_bytes": 38}
_MAJOR, _MINOR = 75, 76
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
STATIC_SHARED_LIMIT = 48 * 1024

_L2_PROMOTION_128B = 2


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint32 * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    ]


# Where an ELF header has the version of the ABI, and the CUDA that it came with.
_ABI_VERSION, _CUDA_OF_ABI = 8, {7: 12, 8: 13}

_forked = False


@cache
def _library() -> ctypes.PyDLL:
    if _forked:
        raise RuntimeError(FORKED)
    library = ctypes.PyDLL("libcuda.so.1")
    # Without these a handle that is a plain int would be cut to 32 bits.
    library.cuGetErrorString.argtypes = [c_int, POINTER(c_char_p)]
    library.cuModuleLoadData.argtypes = [POINTER(c_void_p), c_char_p]
    library.cuModuleGetFunction.argtypes = [POINTER(c_void_p), c_void_p, c_char_p]
    library.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    return library


def told(code: int) -> str:
    """The driver's words for an error."""
    text = c_char_p()
    _library().cuGetErrorString(code, byref(text))
    return f"CUDA error {code}: {(text.value or b'unknown').decode()}"


def check(code: int) -> None:
    """Raises RuntimeError with the driver's words."""
    if code:
        raise RuntimeError(told(code))


def enter(device: int) -> None:
    """Makes the device's primary context, which every framework uses, current in this thread. A
    thread that has made no runtime call yet has none, such as autograd's.
    """
    library, handle, context = _library(), c_int(), c_void_p()
    check(library.cuDeviceGet(byref(handle), c_int(device)))
    check(library.cuDevicePrimaryCtxRetain(byref(context), handle))
    check(library.cuCtxSetCurrent(context))


def figures(device: int) -> dict:
    """Name, architecture and the other fields of a device's DeviceSpec, without a framework."""
    library, handle, name = _library(), c_int(), ctypes.create_string_buffer(256)
    check(library.cuInit(c_uint(0)))
    check(library.cuDeviceGet(byref(handle), c_int(device)))
    check(library.cuDeviceGetName(name, c_int(len(name)), handle))

    def attribute(number: int) -> int:
        value = c_int()
        check(library.cuDeviceGetAttribute(byref(value), c_int(number), handle))
        return value.value

    live = {figure: attribute(number) for figure, number in _FIGURES.items()}
    arch = f"sm_{attribute(_MAJOR)}{attribute(_MINOR)}"
    return {"name": name.value.decode(), "arch": arch, **live}


def cuda_of(code: bytes) -> int | None:
    """The first version of CUDA whose drivers load this machine code, None if it does not say. An
    assembler of CUDA 12 writes version 7 of the ABI into the ELF header, one of CUDA 13 version
    8."""
    return _CUDA_OF_ABI.get(code[_ABI_VERSION]) if len(code) > _ABI_VERSION else None


def version() -> tuple[int, int]:
    """The newest CUDA that the driver serves: (major, minor)."""
    number = c_int()
    check(_library().cuDriverGetVersion(byref(number)))
    return number.value // 1000, number.value % 1000 // 10


def load(artifact: Artifact, device: int) -> c_void_p:
    """The function handle of an artifact in the context of a device. Raises RuntimeError that names
    the kernel, what made it, and the driver, if it cannot be loaded."""
    enter(device)
    library, module, function = _library(), c_void_p(), c_void_p()
    words = f"{artifact.symbol}, made by {artifact.toolchain or 'an unknown assembler'}"
    needed, (major, minor) = cuda_of(artifact.code), version()
    if needed is not None and major < needed:
        raise RuntimeError(
            f"{words}, needs a driver of CUDA {needed}, this machine's serves CUDA {major}.{minor}:"
            " update the driver, or let kernels be assembled by an older ptxas (TRITON_PTXAS_PATH,"
            " which Triton 3.9 calls TRITON_PTXAS_BLACKWELL_PATH for sm_90 too)"
        )
    code = library.cuModuleLoadData(byref(module), artifact.code)
    if code:
        raise RuntimeError(
            f"{words}, did not load on a driver of CUDA {major}.{minor}: {told(code)}"
        )
    check(library.cuModuleGetFunction(byref(function), module, artifact.symbol.encode()))
    if artifact.shared_bytes > STATIC_SHARED_LIMIT:
        check(library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, artifact.shared_bytes))
    return function


def _attributes(
    artifact: Artifact, programmatic: bool, cooperative: bool
) -> "ctypes.Array[_Attribute]":
    """The attributes of a launch. Raises ValueError for those that the architecture lacks."""
    values: dict[int, tuple[int, ...]] = {}
    if artifact.cluster > 1:
        values[CLUSTER_DIMENSION] = (artifact.cluster, 1, 1)
    if programmatic:
        values[PROGRAMMATIC] = (1,)
    if values and int(artifact.target.partition(":")[2]) < 90:
        raise ValueError(
            "clusters and programmatic launches need compute capability 9.0, "
            f"{artifact.symbol} is compiled for {artifact.target}"
        )
    if cooperative:
        # From compute capability 6.0 on. A grid that is too large for the device gives error 720.
        values[COOPERATIVE] = (1,)
    made = (_Attribute * len(values))()
    for attribute, (number, value) in zip(made, values.items(), strict=True):
        attribute.id = number
        attribute.value[: len(value)] = value
    return made


class Slot:
    """An argument buffer with everything that one launch passes to the driver; one thread uses it
    at a time. buffer: the parameters, and after them the words from which tensor maps are encoded
    (`map_words`).
    """

    __slots__ = (
        "address",
        "buffer",
        "config",
        "_arguments",
        "_cluster",
        "_device",
        "_maps",
        "_size",
        "_stream",
    )

    def __init__(
        self,
        artifact: Artifact,
        function: c_void_p,
        device: int,
        programmatic: bool,
        cooperative: bool,
    ):
        words, size = map_words(artifact)
        # Tensor maps must begin at multiples of 64 bytes in the buffer, as in parameter space.
        places = {p.name: p.offset for p in artifact.parameters if p.type == "tensormap"}
        raw = ctypes.create_string_buffer(size + TENSOR_MAP_ALIGN)
        start = -(ctypes.addressof(raw) + next(iter(places.values()), 0)) % TENSOR_MAP_ALIGN
        self.buffer = (ctypes.c_char * size).from_buffer(raw, start)
        self.address = ctypes.addressof(self.buffer)
        twins = self._alike(artifact, places, words)
        self._maps = [
            (self._encoding(artifact.tensor_maps[name], places[name], word), twin)
            for (name, word), twin in zip(words.items(), twins, strict=True)
        ]
        self._size = ctypes.c_size_t(artifact.parameter_bytes)
        self.config = Config()
        self._cluster = artifact.cluster
        self.config.block[:] = (artifact.num_warps * artifact.warp_size, 1, 1)
        self.config.shared_bytes = artifact.shared_bytes
        attributes = _attributes(artifact, programmatic, cooperative)
        if len(attributes):
            self.config.attributes = attributes
        self.config.num_attributes = len(attributes)
        size_at = ctypes.addressof(self._size)
        extra = BUFFER_POINTER, self.address, BUFFER_SIZE, size_at, END
        whole, parts = (c_void_p * len(extra))(*extra), None
        if cooperative:
            # Under capture the driver takes the parameters of such a launch only one by one.
            each = [self.address + parameter.offset for parameter in artifact.parameters]
            whole, parts = None, (c_void_p * len(each))(*each)
        self._arguments = byref(self.config), function, parts, whole
        self._device, self._stream = device, None

    def _encoding(self, meta: dict, place: int, word: int) -> tuple:
        """The arguments with which the driver encodes a map: where to write it, and where its words
        lie. The driver reads from the buffer all that changes between calls."""
        block = meta["block_size"]
        rank = len(block)
        box, ones = ((c_uint32 * rank)(*sizes) for sizes in (reversed(block), [1] * rank))
        sizes = word + 8
        # ctypes passes this argument as it is; it would wrap instances of its types again at each
        # call.
        return (
            byref(self.buffer, place),
            meta["elem_type"],
            rank,
            c_void_p.from_buffer(self.buffer, word),
            byref(self.buffer, sizes),
            byref(self.buffer, sizes + 8 * rank),
            byref(box),
            byref(ones),
            0,
            meta["swizzle"],
            _L2_PROMOTION_128B,
            0,
        )

    def _alike(self, artifact: Artifact, places: dict, words: dict) -> list[tuple]:
        """For each map, how to make it from an earlier one that differs in its address alone: the
        words of both without the address, both maps, and the driver's arguments. Empty if no
        earlier one has its box and type."""
        first: dict[str, str] = {}
        memory, twins = memoryview(self.buffer).cast("B"), []
        for name, word in words.items():
            meta = artifact.tensor_maps[name]
            other = first.setdefault(repr(sorted(meta.items())), name)
            if other == name:
                twins.append(())
                continue
            count = 8 * (2 * len(meta["block_size"]) - 1)
            # Compared by words, not by bytes.
            mine, others = (memory[w + 8 : w + 8 + count].cast("q") for w in (word, words[other]))
            maps = (memory[places[n] : places[n] + TENSOR_MAP_BYTES] for n in (name, other))
            address = c_void_p.from_buffer(self.buffer, word)
            replacing = byref(self.buffer, places[name]), address
            twins.append((mine, others, *maps, replacing))
        return twins

    def set_grid(self, x: int, y: int, z: int) -> None:
        """Sets the grid in programs, of which a cluster has several."""
        _pack_grid(self.config, 0, x * self._cluster, y, z)

    def encode(self, number: int) -> None:
        """Encodes the map of this number from its words."""
        code = _encode(*self._maps[number][0])
        if code:
            check(code)

    def encode_all(self) -> None:
        """Encodes all maps."""
        for arguments, twin in self._maps:
            if twin and twin[0] == twin[1]:
                _, _, mine, other, replacing = twin
                mine[:] = other
                code = _replace(*replacing)
            else:
                code = _encode(*arguments)
            if code:
                check(code)

    def launch(self, stream: int) -> None:
        """Launches with the buffer's arguments on a raw stream of the device, which is current."""
        if stream != self._stream:
            # ctypes takes longer to set a field than all else here.
            self.config.stream = self._stream = stream
        code = _launch(*self._arguments)
        if code == INVALID_CONTEXT:
            enter(self._device)
            code = _launch(*self._arguments)
        if code:
            check(code)


def copy(into: int, rows: int, size: int, stream: int, device: int) -> None:
    """Begins to copy so many bytes from one address to another, which may be other devices' memory,
    on a raw stream of the device, which is current."""
    code = _copy(into, rows, size, stream)
    if code == INVALID_CONTEXT:
        enter(device)
        code = _copy(into, rows, size, stream)
    if code:
        check(code)


def _bind_copy(*arguments) -> int:
    """Binds cuMemcpyDtoDAsync on first use, as `_bind_launch`."""
    global _copy
    bound = _library().cuMemcpyDtoDAsync_v2
    bound.argtypes = [c_uint64, c_uint64, c_size_t, c_void_p]
    _copy = bound
    return _copy(*arguments)


def _bind_launch(*arguments) -> int:
    """Binds cuLaunchKernelEx on first use; later calls go straight to it."""
    global _launch
    _launch = _library().cuLaunchKernelEx
    return _launch(*arguments)


def _bind_encode(*arguments) -> int:
    """The same for cuTensorMapEncodeTiled."""
    global _encode
    _encode = _library().cuTensorMapEncodeTiled
    return _encode(*arguments)


def _bind_replace(*arguments) -> int:
    """The same for cuTensorMapReplaceAddress, which takes a third of the time."""
    global _replace
    _replace = _library().cuTensorMapReplaceAddress
    return _replace(*arguments)


_launch, _encode, _replace, _copy = _bind_launch, _bind_encode, _bind_replace, _bind_copy
# Packs the grid, with which Config begins.
_pack_grid = struct.Struct("<3I").pack_into


def _after_fork() -> None:
    """Forgets the driver: the one that the parent used does not work in a child, where some calls
    fail and some may not return."""
    global _forked, _launch, _encode, _replace, _copy
    if _library.cache_info().currsize:
        _forked, _copy = True, _bind_copy
        _launch, _encode, _replace = _bind_launch, _bind_encode, _bind_replace
        _library.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
