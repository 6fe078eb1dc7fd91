"""Protocol buffers' wire format, read back: what a Triton kernel call of jaxlib is told."""

import struct
import zlib
from typing import Any

# Fields of TritonAnyKernelCall and below.
CALL, NAME = 1, 4
KERNEL, GRID, PARAMETERS = 1, (2, 3, 4), 5
KERNEL_NAME, NUM_WARPS, SHARED, PTX, CAPABILITY, NUM_CTAS, IMAGE = 1, 2, 3, 4, 6, 10, 11
OBJECT_FILE = 1
ARRAY, I32, I64, F32, DESCRIPTOR = 1, 3, 5, 7, 9


def fields(data: bytes) -> dict[int, list[Any]]:
    """The values of each field of a message: ints, floats, or bytes that may be messages."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
        elif key & 7 == 5:
            (value,) = struct.unpack_from("<f", data, at)
            at += 4
        else:
            assert key & 7 == 2, f"wire type {key & 7}"
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def numbers(data: bytes) -> tuple[int, ...]:
    """A packed field of whole numbers."""
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return tuple(found)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


class Call:
    """One kernel call: name, kernel (fields), grid, parameters (field, value) in order."""

    def __init__(self, opaque: bytes):
        whole = fields(zlib.decompress(opaque))
        call = fields(whole[CALL][0])
        self.name = whole[NAME][0].decode()
        self.kernel = fields(call[KERNEL][0])
        self.grid = tuple(call.get(field, [0])[0] for field in GRID)
        found = [fields(parameter) for parameter in call.get(PARAMETERS, [])]
        self.parameters = [(field, value) for p in found for field, (value,) in p.items()]

    @property
    def code(self) -> bytes:
        return fields(self.kernel[IMAGE][0])[OBJECT_FILE][0]

    def zeroed(self) -> list[int]:
        """Bytes that are zeroed of each array, in order."""
        arrays = [fields(value) for field, value in self.parameters if field == ARRAY]
        return [array.get(1, [0])[0] for array in arrays]
