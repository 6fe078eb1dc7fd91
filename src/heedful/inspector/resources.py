"""Registers, memory and occupancy of a kernel, from its metadata and the target's limits."""

import re
from dataclasses import dataclass

from heedful.emulator.program.asm import Program

# Per SIMD: 512 vector registers a lane (VGPR and AGPR together), 800 scalar ones, 8 waves.
_VECTOR_REGISTERS, _VECTOR_GRANULE = 512, 8
_SCALAR_REGISTERS, _SCALAR_GRANULE = 800, 16
_MAX_WAVES, _SIMDS = 8, 4
# LDS of a compute unit, and the step in which it is handed out.
LDS_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
_LDS_GRANULE = {"gfx942": 512, "gfx950": 1280}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Waves per SIMD, and what keeps it from being more ("vgpr", "sgpr", "lds" or "hardware")."""

    waves: float
    limit: str


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that one kernel takes.

    Attributes:
        vgprs: vector registers in all, accumulation registers (agprs) included.
        vgpr_spills, sgpr_spills: registers that did not fit. scratch_bytes: per lane.
        lds_bytes: per workgroup; lds_limit: of the target. waves: per workgroup.
        code_bytes: size of the machine code, 0 if the text does not say.
    """

    arch: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    lds_limit: int
    waves: int
    code_bytes: int

    def occupancy(self) -> Occupancy:
        """Waves per SIMD that registers and LDS allow (LDS by whole workgroups)."""
        limits = {
            "hardware": float(_MAX_WAVES),
            "vgpr": float(_VECTOR_REGISTERS // _round_up(self.vgprs, _VECTOR_GRANULE)),
            "sgpr": float(_SCALAR_REGISTERS // _round_up(self.sgprs, _SCALAR_GRANULE)),
        }
        if self.lds_bytes:
            share = _round_up(self.lds_bytes, _LDS_GRANULE[self.arch])
            limits["lds"] = self.lds_limit // share * self.waves / _SIMDS
        limit = min(limits, key=lambda name: limits[name])
        return Occupancy(limits[limit], limit)

    @property
    def fits(self) -> bool:
        """Whether the workgroup's LDS exists on the target (compilation does not check)."""
        return self.lds_bytes <= self.lds_limit


def _round_up(value: int, step: int) -> int:
    return max(-(-value // step), 1) * step


def resources(text: str, program: Program, lds_bytes: int) -> Resources:
    """Read the metadata of the kernel that `program` was parsed from."""

    def number(name: str) -> int:
        match = re.search(rf"^\s*(?:- )?\.{name}:\s*(\d+)", text, re.M)
        return int(match[1]) if match else 0

    size = re.search(r"codeLenInByte\s*=\s*(\d+)", text)
    return Resources(
        arch=program.arch,
        vgprs=number("vgpr_count"),
        agprs=number("agpr_count"),
        sgprs=number("sgpr_count"),
        vgpr_spills=number("vgpr_spill_count"),
        sgpr_spills=number("sgpr_spill_count"),
        scratch_bytes=number("private_segment_fixed_size"),
        lds_bytes=lds_bytes or number("group_segment_fixed_size"),
        lds_limit=LDS_BYTES[program.arch],
        waves=-(-program.max_workgroup // 64),
        code_bytes=int(size[1]) if size else 0,
    )
