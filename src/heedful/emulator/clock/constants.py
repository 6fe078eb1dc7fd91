"""Every number that the clock uses, with its source.

A number without a document or a published measurement is fitted, and says so: two for each chip,
of which it shares one. They take up whatever the replay does not know. `tools/objects/clock.py`
fits them on three kinds of code object and predicts all others.
"""

from __future__ import annotations

from dataclasses import dataclass

FITTED = "fitted"
# A slot: each SIMD of a compute unit issues every fourth clock.
SLOT = 4

_LLVM = "LLVM, AMDGPU/SISchedule.td"
_HAZARDS = "LLVM, GCNHazardRecognizer.cpp, and the CDNA3 and CDNA4 ISA guides, section 4.5"
_PR = "LLVM pull request 233721, measured on MI308X and MI350X"
_PAPER3 = "AMD CDNA 3 white paper"
_PAPER4 = "AMD CDNA 4 white paper"
_PROFILER = "ROCm Compute Profiler, Pipeline descriptions: LDS"
_MT4G = "caps-tum/mt4g, report of an MI300X, 2025-08-08"
_AS_CDNA3 = "no figure published for CDNA 4: that of CDNA 3"
_CUBE = "power is C V^2 f, and grows with the cube of the clock where the voltage follows it"
_ISA = "CDNA3 and CDNA4 ISA guides, section 4.4: the width of the field in s_waitcnt"


@dataclass(frozen=True)
class Constant:
    """One number: for gfx942, for gfx950, in which unit, and where each is from."""

    gfx942: float
    gfx950: float
    unit: str
    source: str
    source_gfx950: str = ""

    def of(self, arch: str) -> float:
        """The number for a chip."""
        return getattr(self, arch)

    def source_of(self, arch: str) -> str:
        """Where the number for a chip is from."""
        return self.source_gfx950 or self.source if arch == "gfx950" else self.source


def _both(value: float, unit: str, source: str, source_gfx950: str = "") -> Constant:
    return Constant(value, value, unit, source, source_gfx950)


CONSTANTS: dict[str, Constant] = {
    # The chip.
    "compute_units": Constant(304, 256, "compute units", _PAPER3, _PAPER4),
    "dies": _both(8, "dies that take workgroups in turn", _PAPER3, _PAPER4),
    "simds": _both(4, "SIMDs a compute unit", _PAPER3, _PAPER4),
    "waves": _both(8, "waves a SIMD", _PROFILER.replace("LDS", "VALU")),
    "registers": _both(512, "VGPRs a lane", _PAPER3, _PAPER4),
    "register_unit": _both(8, "VGPRs", "LLVM, AMDGPUUsage: granularity of vgpr allocation"),
    "lds_bytes": Constant(65536, 163840, "bytes a compute unit", _PAPER3, _PAPER4),
    "lds_unit": Constant(512, 1280, "bytes", "LLVM, AMDGPU/GCNProcessors.td and AMDGPUUsage"),
    # Issue, in slots.
    "trans_slots": Constant(
        4, 2, "slots", f"{_LLVM}: WriteTrans32", f"{_PAPER4}: twice the rate of CDNA 3"
    ),
    "quarter_slots": _both(4, "slots", f"{_LLVM}: WriteQuarterRate32"),
    "branch_slots": _both(8, "slots until the wave goes on", f"{_LLVM}: WriteBranch"),
    "mfma_hold": _both(1, "slots that any MFMA holds VALU off", _PR),
    "mfma_hold_bytes": _both(16, "bytes of A and B a lane for one more slot", _PR),
    "packed_after": Constant(
        2, 3, "slots after an MFMA's passes that v_pk_*_f32 and dot products wait", _PR
    ),
    # LDS, in clocks.
    "lds_read_bytes": Constant(
        128,
        256,
        "bytes a clock",
        _PROFILER,
        "Chips and Cheese on CDNA 4: read bandwidth doubled; 64 banks",
    ),
    "lds_write_bytes": _both(128, "bytes a clock", _PROFILER),
    "lds_ports": _both(2, "ports, one for two SIMDs", _PROFILER),
    "lds_latency": _both(51, "clocks", _MT4G, _AS_CDNA3),
    "lds_outstanding": _both(15, "operations a wave", _ISA),
    # Memory, in clocks.
    "memory_bytes": _both(64, "bytes a clock and compute unit", f"{_PAPER3}: L1 data cache"),
    "l2_bytes": Constant(
        2048 / 38, 2048 / 32, "bytes a clock and compute unit", f"{_PAPER3}: 2 KB a clock and die"
    ),
    "l2_latency": _both(288, "clocks", _MT4G, _AS_CDNA3),
    "scalar_latency": _both(172, "clocks: cache and a miss", _MT4G, _AS_CDNA3),
    "memory_outstanding": _both(63, "operations a wave", _ISA),
    "hbm_bytes": Constant(5.3e12, 8.0e12, "bytes a second", _PAPER3, _PAPER4),
    # Bounds of what the clock may be, for ranges.
    "clock_low": Constant(
        1.2e9,
        1.6e9,
        "Hz",
        "assumed, as the lowest under full load; the predicted clock where that is lower",
    ),
    "clock_high": Constant(2.1e9, 2.4e9, "Hz", _PAPER3, _PAPER4),
    "idle_exponent": _both(1 / 3, "power of what is not busy by which the clock rises", _CUBE),
    "least_activity": _both(
        0.8, "activity below which so, too", "assumed: no object that fits clocks has less"
    ),
    # Fitted: see measurements/emulator/050-clock.csv.
    "clock_full": Constant(
        1.032e9, 1.493e9, "Hz at which matrix units that are always busy take all power", FITTED
    ),
    "data_power": _both(
        0.128, "power of LDS, memory and atomics that are always busy over that of MFMA", FITTED
    ),
    "atomics": Constant(0.325e12, 0.325e12, "dwords a second", FITTED),
}


def constant(name: str, arch: str) -> float:
    """One number for one chip."""
    return CONSTANTS[name].of(arch)
