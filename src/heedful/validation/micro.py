"""Micro-kernels for CDNA: measurements of rules that the emulator's clock takes from documents.

Each runs one loop on every SIMD and counts clocks and ticks of 100 MHz around it. The emulator runs
the same machine code, and its clock predicts the count. Where the two differ, a rule is wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from heedful.emulator import At, predict_time
from heedful.emulator.clock.constants import CONSTANTS, constant
from heedful.launch import compiler
from heedful.launch.spec import KernelCall, KernelRef, Pointer, Scalar

_MODULE = "heedful.validation.probes"
_WARPS = 4
LANES = 64 * _WARPS
# Elements that atomics add to: 16 MiB, as much as the gradient of 32 heads of 1024 queries.
_SIZE = 2**22
TICKS_HZ = 1e8
# Rounds that are emulated; the difference is the time of one.
_FEW, _MORE = 4, 12
# Clocks that a launch takes on hardware: a few milliseconds.
_CLOCKS = 4e6

# Registers of the loops: A and B, eight for vector instructions, four accumulators.
_FIRST, _VALU, _SUMS = 16, 24, 32
_MFMA = {
    "gfx942": ("v_mfma_f32_32x32x8_bf16", 2),
    "gfx950": ("v_mfma_f32_32x32x16_bf16", 4),
}
ARCHES = tuple(_MFMA)
# As a kernel holds a compute unit alone if it may touch all registers, its waves have a SIMD each.
_TOUCHED = [f"s{i}" for i in range(40, 52)] + [f"v{i}" for i in range(_FIRST, 256)]
_TOUCHED += [f"a{i}" for i in range(256)] + ["scc"]
CONSTRAINTS = ",".join(["=&v", "=&v", "v", "v", *(f"~{{{name}}}" for name in _TOUCHED)])


@dataclass(frozen=True)
class Probe:
    """One micro-kernel.

    name: unique. words: what its count settles. body: the lines of one round, none for atomics.
    unit: what a round has so many of.
    """

    name: str
    words: str
    body: tuple[str, ...] = ()
    count: int = 1
    unit: str = "instruction"


@dataclass(frozen=True)
class Measured:
    """On hardware: seconds of a launch; of the loop, the clocks of one unit and their rate."""

    seconds: float
    clocks: float | None = None
    clock_hz: float | None = None


@dataclass(frozen=True)
class Predicted:
    """By the emulator's clock: seconds of a launch, the clocks of one unit, the clock."""

    seconds: float
    clocks: float
    clock_hz: float


def probes(arch: str) -> list[Probe]:
    """All micro-kernels of a chip. Raises ValueError for one that has no clock."""
    if arch not in ARCHES:
        raise ValueError(f"arch must be among {', '.join(ARCHES)}, got {arch!r}")
    fma = f"v_fma_f32 v{_VALU}, v{_VALU}, v{_VALU}, v{_VALU}"
    made = [
        Probe("clock", "the clock of light work: dependent FMAs", (fma,) * 64, 64),
        Probe("exponentials", "slots of a transcendental", tuple(_vector("v_exp_f32", 64)), 64),
        _beside(arch, 0, "v_mul_f32"),
    ]
    made += [_beside(arch, n, "v_mul_f32") for n in (4, 5, 6, 7, 8)]
    made += [_beside(arch, n, "v_pk_mul_f32") for n in (1, 2)]
    return [*made, Probe("atomics", "the rate of float32 atomics", (), LANES, "dword")]


def _vector(name: str, count: int) -> Iterator[str]:
    """Vector instructions of one operand, on eight registers in turn."""
    for i in range(count):
        register = _VALU + i % 8
        yield f"{name} v{register}, v{register}"


def _beside(arch: str, count: int, name: str) -> Probe:
    """MFMAs with so many vector instructions after each."""
    mfma, width = _MFMA[arch]
    a, b = (f"v[{first}:{first + width - 1}]" for first in (_FIRST, _FIRST + 4))
    body: list[str] = []
    for group in range(16):
        first = _SUMS + 16 * (group % 4)
        sums = f"v[{first}:{first + 15}]"
        body.append(f"{mfma} {sums}, {a}, {b}, {sums}")
        for i in range(count):
            one = _VALU + 2 * ((group * count + i) % 4)
            register = f"v[{one}:{one + 1}]" if "_pk_" in name else f"v{one}"
            body.append(f"{name} {register}, {register}, {register}")
    label = f"MFMA + {count} {name}" if count else "MFMA"
    words = f"clocks of an MFMA with {count} vector instructions" if count else "of MFMAs alone"
    return Probe(label, words, tuple(body), 16, "MFMA")


def assembly(body: Sequence[str]) -> str:
    """The loop of these lines, with both counters around it."""
    random = [f"v_mul_lo_u32 v{_FIRST}, $3, s41", "s_mov_b32 s41, 0xbfffbfff"]
    random += [f"v_and_b32 v{i}, s41, v{_FIRST}" for i in range(_FIRST, _VALU)]
    lines = ["v_readfirstlane_b32 s40, $2", "s_mov_b32 s41, 0x9e3779b1", *random]
    lines += [f"v_mov_b32 v{i}, 0" for i in range(_VALU, _SUMS + 64)]
    lines += ["s_nop 7", "s_barrier", "s_memrealtime s[42:43]", "s_memtime s[44:45]"]
    lines += ["s_waitcnt lgkmcnt(0)", "micro_kernel_loop:", *body]
    lines += ["s_sub_i32 s40, s40, 1", "s_cmp_lg_i32 s40, 0", "s_cbranch_scc1 micro_kernel_loop"]
    lines += ["s_memtime s[46:47]", "s_memrealtime s[48:49]", "s_waitcnt lgkmcnt(0)"]
    lines += ["s_sub_u32 s46, s46, s44", "s_sub_u32 s48, s48, s42", "s_nop 15", "s_nop 15"]
    return "\n".join([*lines, "v_mov_b32 $0, s46", "v_mov_b32 $1, s48"])


def call_of(probe: Probe, iterations: int, programs: int) -> KernelCall:
    """The launch of a micro-kernel. It has one buffer: `out`, int32, or float32 for atomics."""
    grid, options = (programs, 1, 1), {"num_warps": _WARPS}
    parameters = {"iterations": Scalar(iterations), "LANES": LANES}
    if not probe.body:
        parameters |= {"x": Pointer("out", "float32"), "SIZE": _SIZE}
        return KernelCall(KernelRef(_MODULE, "atomics"), grid, parameters, options)
    parameters |= {"out": Pointer("out", "int32")}
    parameters |= {"ASM": assembly(probe.body), "CONSTRAINTS": CONSTRAINTS}
    return KernelCall(KernelRef(_MODULE, "timed"), grid, parameters, options)


def elements(call: KernelCall) -> int:
    """How many elements of 4 bytes the buffer of a launch has."""
    return call.grid[0] * LANES * 2 if "ASM" in call.constants else _SIZE


def predicted(probe: Probe, arch: str, units: int, iterations: int | None = None) -> Predicted:
    """A launch on so many compute units, as the emulator's clock has it.

    iterations: rounds of the launch, by default as many as `rounds` says.
    """
    call = call_of(probe, 1, units)
    artifact = compiler.artifact(call, arch)
    memory = np.zeros(elements(call), np.int32)
    few, more = (
        predict_time(artifact, (units,), _arguments(artifact, memory, n), checks=())[0]
        for n in (_FEW, _MORE)
    )
    each = (more.clocks - few.clocks) / (_MORE - _FEW)
    seconds = (more.seconds - few.seconds) / (_MORE - _FEW)
    if probe.body:
        seconds = each / more.clock_hz
    count = iterations or _rounds(each)
    whole = few.seconds + (count - _FEW) * seconds
    return Predicted(whole, each / probe.count, more.clock_hz)


def _arguments(artifact, memory: np.ndarray, iterations: int) -> list:
    values = {"out": At(memory), "x": At(memory), "iterations": iterations}
    return [values.get(parameter.name) for parameter in artifact.parameters]


def _rounds(clocks: float) -> int:
    return max(int(_CLOCKS / clocks), _MORE)


def rounds(probe: Probe, arch: str) -> int:
    """Rounds of a launch on hardware: it takes about 4 million clocks, if the prediction holds."""
    return _rounds(predicted(probe, arch, 1).clocks * probe.count)


def measured(
    probe: Probe, programs: int, iterations: int, launch: Callable[[KernelCall], tuple]
) -> Measured:
    """Measure a launch. launch: runs a call on a zeroed buffer and returns the seconds that it
    took, and the buffer as a NumPy array."""
    seconds, out = launch(call_of(probe, iterations, programs))
    if not probe.body:
        return Measured(seconds)
    counts = out.reshape(programs, LANES, 2).astype(np.int64)[:, ::64] % 2**32
    clocks, ticks = (counts[..., i].ravel().tolist() for i in range(2))
    rate = TICKS_HZ * median(c / max(t, 1) for c, t in zip(clocks, ticks, strict=True))
    return Measured(seconds, median(clocks) / iterations / probe.count, rate)


def sources(arch: str) -> dict[str, dict]:
    """The clock's numbers for a chip with their sources, for reports."""
    return {
        name: {"value": constant(name, arch), "unit": c.unit, "source": c.source_of(arch)}
        for name, c in CONSTANTS.items()
    }
