"""A vendor's library of Python functions, which answers a driver's calls and remembers them."""

import ctypes
import struct

FUNCTION = 0x77
# Handle of the first device; of its context less that.
HANDLE, CONTEXT = 50, 0x10_0000_0000


# CU_DEVICE_ATTRIBUTE_*, by their numbers in cuda.h.
ATTRIBUTES = {16: 84, 38: 6 << 20, 75: 8, 76: 6, 97: 101376}


def deref(pointer):
    """What a byref or a pointer points to."""
    return getattr(pointer, "_obj", pointer)


class Library:
    """Answers every call with a code, 0 unless `codes` says otherwise, and remembers it."""

    def __init__(self, **codes: list[int]):
        self.calls: list[tuple] = []
        self.codes = codes
        self.launched: list[dict] = []
        self.version = 13000

    def __getattr__(self, name: str):
        if not name.startswith(("cu", "hip")):
            raise AttributeError(name)

        def function(*arguments):
            self.calls.append((name, *arguments))
            self._answer(name, arguments)
            return self.codes[name].pop(0) if self.codes.get(name) else 0

        return function

    def _answer(self, name: str, arguments: tuple) -> None:
        if name in ("cuModuleGetFunction", "hipModuleGetFunction"):
            deref(arguments[0]).value = FUNCTION
        if name == "cuDeviceGet":
            handle, ordinal = arguments
            deref(handle).value = HANDLE + ordinal.value
        if name == "cuDevicePrimaryCtxRetain":
            context, handle = arguments
            deref(context).value = CONTEXT + handle.value
        if name == "cuDeviceGetAttribute":
            value, number, handle = arguments
            assert handle.value == HANDLE
            deref(value).value = ATTRIBUTES[number.value]
        if name == "cuDeviceGetName":
            name_buffer, length, handle = arguments
            assert (length.value, handle.value) == (len(name_buffer), HANDLE)
            name_buffer.value = b"NVIDIA RTX A6000"
        if name == "cuDriverGetVersion":
            deref(arguments[0]).value = self.version
        if name == "cuGetErrorString":
            deref(arguments[1]).value = b"bad luck"
        if name == "cuLaunchKernelEx":
            self.launched.append(described(deref(arguments[0]), *arguments[1:]))
        if name == "hipModuleLaunchKernel":
            self.launched.append(dict(head=arguments[:8], stream=arguments[8]))
            self.launched[-1] |= buffer_of(arguments[10], end=3)
        if name == "cuTensorMapEncodeTiled":
            ctypes.memmove(arguments[0], bytes(range(128)), 128)
        if name == "cuTensorMapReplaceAddress":
            place, address = arguments
            ctypes.memmove(place, struct.pack("<Q", address.value), 8)

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


def described(config, function, parameters, extra) -> dict:
    attributes = [config.attributes[i] for i in range(config.num_attributes)]
    facts = {
        "grid": tuple(config.grid),
        "block": tuple(config.block),
        "shared": config.shared_bytes,
        "stream": config.stream,
        "attributes": [(a.id, tuple(a.value[:3])) for a in attributes],
        "function": function.value,
    }
    if extra is None:
        return facts | {"parameters": tuple(parameters)}
    assert parameters is None
    return facts | buffer_of(extra, end=0)


def buffer_of(extra, end: int) -> dict:
    """The bytes that (1, address, 2, pointer to their number, end) tells of."""
    tags = tuple(extra)
    assert (tags[0], tags[2]) == (1, 2) and (tags[4] or 0) == end
    size = ctypes.cast(tags[3], ctypes.POINTER(ctypes.c_size_t))[0]
    return {"bytes": ctypes.string_at(tags[1], size), "address": tags[1]}
