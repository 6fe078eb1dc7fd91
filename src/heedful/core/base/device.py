"""A device as the planner sees it: a few properties. A table has them for planning without a GPU.
At run time those read from the device replace them, since a part may be partitioned or cut down."""

from dataclasses import field, replace

from heedful.core.base.frozen import dataclass

KIB = 1024
MIB = 1024 * KIB
NO_GPU_ON_WINDOWS = (
    "GPU kernels run on Linux alone, WSL included; on Windows itself heedful computes on the CPU"
)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device. Rates are the vendor's, for dense arithmetic. Only reports use them, no gate
    does; 0 means unknown.

    arch: the compiler's name of the target: sm_90, gfx950, cpu.
    units: streaming multiprocessors or compute units.
    shared_bytes: shared memory or LDS that one block may use.
    left: further units, which kernels of a fixed number of programs leave to others.
    """

    name: str
    arch: str
    units: int
    shared_bytes: int
    l2_bytes: int
    dram_bytes_per_s: float = 0.0
    bf16_flops: float = 0.0
    left: int = field(default=0, repr=False)

    @property
    def vendor(self) -> str:
        """nvidia, amd or cpu."""
        return vendor_of(self.arch)

    def live(self, **figures) -> "DeviceSpec":
        """This device with figures read from the hardware in place of the table's."""
        return replace(self, **figures)


def lent(spec: DeviceSpec, margin: int) -> DeviceSpec:
    """The device that kernels are planned for: without so many SMs, which are left to others. Their
    number stays even, as clusters of two programs want it."""
    if not margin or spec.vendor == "cpu":
        return spec
    units = max(2, (spec.units - margin) // 2 * 2)
    return spec.live(units=units, left=spec.units - units)


def vendor_of(arch: str) -> str:
    """nvidia, amd or cpu. Raises ValueError if this is not the name of an architecture."""
    for vendor, prefix in (("nvidia", "sm_"), ("amd", "gfx"), ("cpu", "cpu")):
        if arch.startswith(prefix):
            return vendor
    raise ValueError(f"arch must be sm_*, gfx* or cpu, got {arch!r}")


# name: (arch, units, shared bytes per block, L2 bytes, DRAM bytes/s, dense bf16 FLOP/s)
# Sources: vendor datasheets and CUDA's compute-capability table; AMD: CDNA3/CDNA4 white papers.
KNOWN: dict[str, DeviceSpec] = {
    name: DeviceSpec(name, *figures)
    for name, figures in {
        "H200": ("sm_90", 132, 227 * KIB, 60 * MIB, 4.8e12, 989e12),
        "H100": ("sm_90", 132, 227 * KIB, 50 * MIB, 3.35e12, 989e12),
        "A100": ("sm_80", 108, 163 * KIB, 40 * MIB, 2.0e12, 312e12),
        "RTX 3090": ("sm_86", 82, 99 * KIB, 6 * MIB, 0.936e12, 71e12),
        "RTX 4090": ("sm_89", 128, 99 * KIB, 72 * MIB, 1.01e12, 165e12),
        "B200": ("sm_100", 148, 227 * KIB, 126 * MIB, 8.0e12, 2250e12),
        "RTX 5090": ("sm_120", 170, 99 * KIB, 96 * MIB, 1.79e12, 210e12),
        "MI300X": ("gfx942", 304, 64 * KIB, 4 * MIB, 5.3e12, 1307e12),
        "MI350X": ("gfx950", 256, 160 * KIB, 4 * MIB, 8.0e12, 2300e12),
        "MI355X": ("gfx950", 256, 160 * KIB, 4 * MIB, 8.0e12, 2500e12),
        "CPU": ("cpu", 1, 0, 1 * MIB, 5e10, 1e12),
    }.items()
}


def of_arch(arch: str, **figures) -> DeviceSpec:
    """A device of this architecture. live: name, units, shared_bytes and l2_bytes as read from the
    hardware. The rates are those of the first known device of the architecture, if there is one."""
    known = next((spec for spec in KNOWN.values() if spec.arch == arch), None)
    return DeviceSpec(arch=arch, **figures) if known is None else known.live(**figures)


def by_name(name: str) -> DeviceSpec:
    """The known device of this name (any case, `mi355x`, `rtx-4090`) or the first of this arch."""
    wanted = name.lower().replace("-", " ").replace("_", " ").strip()
    for spec in KNOWN.values():
        if wanted in (spec.name.lower(), spec.arch.replace("_", " ")):
            return spec
    raise ValueError(
        f"unknown device {name!r}; known: {', '.join(KNOWN)}, or an arch such as sm_90"
    )
