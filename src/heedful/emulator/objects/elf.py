"""An AMD GPU code object's kernels: where their code lies, arguments, launch facts.

Written after the ELF specification and LLVM's "User Guide for AMDGPU Backend" (code object
versions 3 to 6: notes with MessagePack metadata, kernel descriptors of 64 bytes).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from heedful.emulator.objects.msgpack import unpack
from heedful.emulator.program.asm import Argument, AsmError

# Processors by the machine field of the ELF flags.
_MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}
_EM_AMDGPU = 224
_NOTE_METADATA = 32
_SHT_SYMTAB, _SHT_NOTE, _SHT_NOBITS, _SHT_DYNSYM = 2, 7, 8, 11
# Scalar registers that a kernel asks for, by bit of the descriptor's code properties.
_USER_SGPRS = (
    "private_segment_buffer",
    "dispatch_ptr",
    "queue_ptr",
    "kernarg_segment_ptr",
    "dispatch_id",
    "flat_scratch_init",
    "private_segment_size",
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a code object.

    Attributes:
        entry: address of its first instruction. directives: facts of its descriptor, under the
            names that the assembler's `.amdhsa_` directives have.
        lds_bytes: the LDS that the code object itself asks for; a launch may add to it.
    """

    name: str
    entry: int
    directives: dict[str, int]
    arguments: tuple[Argument, ...]
    kernarg_bytes: int
    max_workgroup: int
    lds_bytes: int


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    address: int
    offset: int
    size: int
    link: int
    entry_size: int


class CodeObject:
    """The parts of one ELF file that a launch needs.

    Raises:
        AsmError: not an ELF of gfx942 or gfx950, cut short, or without metadata.
    """

    def __init__(self, data: bytes, name: str = "code object"):
        self.data, self.name = data, name
        if data[:6] != b"\x7fELF\x02\x01":
            raise AsmError(f"{name}: not a little-endian 64-bit ELF file")
        try:
            machine, flags = self._unpack("<H", 18)[0], self._unpack("<I", 48)[0]
            if machine != _EM_AMDGPU or flags & 0xFF not in _MACHINES:
                known = ", ".join(_MACHINES.values())
                raise AsmError(
                    f"{name}: ELF machine {machine}, flags {flags:#x}; expected one of {known}"
                )
            self.arch = _MACHINES[flags & 0xFF]
            self._sections = self._read_sections()
            self.kernels = self._read_kernels()
        except (struct.error, IndexError, KeyError) as error:
            raise AsmError(f"{name}: cut short or damaged ({error!r})") from error

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of that name; without a name the only one."""
        names = [k.name for k in self.kernels]
        if name is None and len(names) == 1:
            return self.kernels[0]
        if name not in names:
            raise AsmError(f"{self.name}: kernel {name!r} is none of {names}; name one of them")
        return self.kernels[names.index(name)]

    def end_of(self, kernel: Kernel) -> int:
        """The address where the code behind `kernel.entry` ends: the next kernel or its section."""
        inside = [s for s in self._sections if s.address <= kernel.entry < s.address + s.size]
        if not inside:
            raise AsmError(f"{self.name}: kernel {kernel.name} starts outside every section")
        ends = [k.entry for k in self.kernels if k.entry > kernel.entry]
        return min([inside[0].address + inside[0].size, *ends])

    def _unpack(self, layout: str, offset: int) -> tuple[Any, ...]:
        return struct.unpack_from(layout, self.data, offset)

    def _read_sections(self) -> list[_Section]:
        start = self._unpack("<Q", 40)[0]
        size, count, names = self._unpack("<HHH", 58)
        raw = [self._unpack("<IIQQQQIIQQ", start + i * size) for i in range(count)]
        text = raw[names][4] if raw else 0
        return [
            _Section(self._string(text + r[0]), r[1], r[3], r[4], r[5], r[6], r[9]) for r in raw
        ]

    def _string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def bytes_at(self, address: int, size: int) -> bytes:
        """Bytes by their address in memory."""
        for s in self._sections:
            if s.kind != _SHT_NOBITS and s.address and s.address <= address < s.address + s.size:
                start = s.offset + address - s.address
                return self.data[start : start + size]
        raise AsmError(f"{self.name}: address {address:#x} lies in no section")

    @cached_property
    def symbols(self) -> dict[str, int]:
        """Addresses by name."""
        found: dict[str, int] = {}
        for s in self._sections:
            if s.kind in (_SHT_SYMTAB, _SHT_DYNSYM):
                strings = self._sections[s.link].offset
                for at in range(s.offset, s.offset + s.size, s.entry_size):
                    name, _, _, _, value, _ = self._unpack("<IBBHQQ", at)
                    found[self._string(strings + name)] = value
        return found

    def _metadata(self) -> dict:
        for s in self._sections:
            at, end = s.offset, s.offset + s.size
            while s.kind == _SHT_NOTE and at + 12 <= end:
                named, described, kind = self._unpack("<III", at)
                owner = self.data[at + 12 : at + 12 + named].rstrip(b"\0")
                start = at + 12 + -(-named // 4) * 4
                if owner == b"AMDGPU" and kind == _NOTE_METADATA:
                    return unpack(self.data[start : start + described])
                at = start + -(-described // 4) * 4
        raise AsmError(f"{self.name}: no AMDGPU metadata note (code object version 3 or newer)")

    def _read_kernels(self) -> list[Kernel]:
        return [self._kernel(entry) for entry in self._metadata()["amdhsa.kernels"]]

    def _kernel(self, entry: dict) -> Kernel:
        symbol = entry.get(".symbol", entry[".name"] + ".kd")
        address = self.symbols[symbol]
        raw = self.bytes_at(address, 64)
        if len(raw) != 64:
            raise AsmError(f"{self.name}: kernel descriptor {symbol} is cut short")
        directives, start, lds_bytes = read_descriptor(raw)
        arguments = tuple(
            Argument(a[".offset"], a[".size"], a[".value_kind"], a.get(".name", ""))
            for a in entry.get(".args", ())
        )
        return Kernel(
            entry[".name"],
            address + start,
            directives,
            arguments,
            entry[".kernarg_segment_size"],
            entry.get(".max_flat_workgroup_size", 0),
            max(lds_bytes, entry.get(".group_segment_fixed_size", 0)),
        )


def read_descriptor(raw: bytes) -> tuple[dict[str, int], int, int]:
    """The 64 bytes of a kernel descriptor.

    Returns:
        Facts under the names of the assembler's directives, the distance from the descriptor to
        the first instruction, and the bytes of LDS.

    Raises:
        AsmError: a mode that the emulator does not have.
    """
    lds, scratch, _, _, entry = struct.unpack_from("<IIIIq", raw)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", raw, 44)
    if properties >> 10 & 1:
        raise AsmError("the kernel runs in waves of 32, which gfx942 and gfx950 do not have")
    if rsrc1 >> 12 & 3:
        raise AsmError(f"float_round_mode_32 is {rsrc1 >> 12 & 3}; the emulator has 0, to nearest")
    facts = {f"user_sgpr_{name}": properties >> i & 1 for i, name in enumerate(_USER_SGPRS)}
    facts |= {
        "user_sgpr_count": rsrc2 >> 1 & 31,
        "user_sgpr_kernarg_preload_length": preload & 127,
        "user_sgpr_kernarg_preload_offset": preload >> 7,
        "system_sgpr_workgroup_id_x": rsrc2 >> 7 & 1,
        "system_sgpr_workgroup_id_y": rsrc2 >> 8 & 1,
        "system_sgpr_workgroup_id_z": rsrc2 >> 9 & 1,
        "system_vgpr_workitem_id": rsrc2 >> 11 & 3,
        "private_segment_fixed_size": scratch,
        "float_denorm_mode_32": rsrc1 >> 16 & 3,
        "float_denorm_mode_16_64": rsrc1 >> 18 & 3,
        "fp16_overflow": rsrc1 >> 26 & 1,
        "next_free_vgpr": 8 * ((rsrc1 & 63) + 1),
        "accum_offset": 4 * ((rsrc3 & 63) + 1),
    }
    return facts, entry, lds
