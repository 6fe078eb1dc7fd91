"""A reader of MessagePack, the format of a code object's metadata."""

from __future__ import annotations

import struct
from typing import Any

from heedful.emulator.program.asm import AsmError

_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
# Values whose length follows: the length's layout, and what they hold.
_SIZED = {0xC4: (">B", "bin"), 0xC5: (">H", "bin"), 0xC6: (">I", "bin")}
_SIZED |= {0xD9: (">B", "str"), 0xDA: (">H", "str"), 0xDB: (">I", "str")}
_SIZED |= {0xDC: (">H", "array"), 0xDD: (">I", "array"), 0xDE: (">H", "map"), 0xDF: (">I", "map")}


class _Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) != count:
            raise AsmError(f"MessagePack ends {count - len(part)} bytes early")
        self.at += count
        return part

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def value(self) -> Any:
        tag = self.take(1)[0]
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 256
        if tag in _FIXED:
            return _FIXED[tag]
        if tag in _NUMBERS:
            return self.number(_NUMBERS[tag])
        if tag in _SIZED:
            layout, kind = _SIZED[tag]
            return self.sized(kind, self.number(layout))
        if tag < 0xC0:
            kind, count = ("map", tag & 15) if tag < 0x90 else ("array", tag & 15)
            return self.sized("str", tag & 31) if tag >= 0xA0 else self.sized(kind, count)
        raise AsmError(f"MessagePack has type {tag:#x} at byte {self.at - 1}, which is not read")

    def sized(self, kind: str, count: int) -> Any:
        if kind == "bin":
            return self.take(count)
        if kind == "str":
            return self.take(count).decode()
        if kind == "array":
            return [self.value() for _ in range(count)]
        return {self.value(): self.value() for _ in range(count)}


def unpack(data: bytes) -> Any:
    """The one value that `data` holds.

    Raises:
        AsmError: it ends early, has a type that metadata has not, or more follows.
    """
    reader = _Reader(data)
    value = reader.value()
    if reader.at != len(data):
        raise AsmError(f"MessagePack has {len(data) - reader.at} bytes behind its value")
    return value
