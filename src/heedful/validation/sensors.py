"""AMD GPUs as the Linux kernel's files show them, without a library or a tool: which there are
(amdkfd), and clocks, power and temperature while something runs (hwmon)."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

_DEVICES = Path("/sys/bus/pci/devices")
# By name: the files that may hold it, the first that is there, and the unit's inverse.
_FILES = {
    "clock_mhz": (("freq1_input",), 1e-6),
    "memory_mhz": (("freq2_input",), 1e-6),
    "power_w": (("power1_average", "power1_input"), 1e-6),
    "temperature_c": (("temp2_input", "temp1_input"), 1e-3),
}
_EVERY = 0.02
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def gpus(nodes: Path = _NODES) -> list[str]:
    """The architecture of every AMD GPU for computing, such as gfx942; whatever torch is there."""
    arches = []
    for node in sorted(nodes.glob("*/properties")):
        try:
            facts = dict(line.split(None, 1) for line in node.read_text().splitlines() if line)
            version = int(facts.get("gfx_target_version", 0))
        except (OSError, ValueError):
            continue
        if version:  # a CPU has 0
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            arches.append(f"gfx{major}{minor:x}{step:x}")
    return arches


def folder(address: str, devices: Path = _DEVICES) -> Path | None:
    """The hwmon folder of the GPU at a PCI address such as 0000:05:00.0; None without one."""
    return next(iter(sorted((devices / address / "hwmon").glob("hwmon*"))), None)


def reading(place: Path) -> dict[str, float]:
    """The values now, those that can be read."""
    values = {}
    for name, (files, scale) in _FILES.items():
        for file in files:
            number = _number(place / file)
            if number is not None:
                values[name] = number * scale
                break
    return values


def cap_w(place: Path) -> float | None:
    """The limit of power."""
    number = _number(place / "power1_cap")
    return None if number is None else number * 1e-6


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def rocm_version() -> str | None:
    """The version of the ROCm that is installed; None where it cannot be found."""
    root = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    for path in (root / ".info" / "version", root / ".info" / "version-dev"):
        try:
            return path.read_text().strip()
        except OSError:
            continue
    return None


@contextmanager
def sampled(place: Path | None) -> Iterator[list[dict[str, float]]]:
    """Readings, with the seconds since the start, that another thread adds to the list meanwhile;
    none without a folder."""
    samples: list[dict[str, float]] = []
    if place is None:
        yield samples
        return
    stop, began = threading.Event(), time.perf_counter()

    def watch() -> None:
        while not stop.wait(_EVERY):
            samples.append({"seconds": time.perf_counter() - began, **reading(place)})

    thread = threading.Thread(target=watch, name="heedful-sensors", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def summary(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """By name the least, the median and the largest value."""
    made = {}
    for name in _FILES:
        values = [sample[name] for sample in samples if name in sample]
        if values:
            made[name] = {"low": min(values), "median": median(values), "high": max(values)}
    return made
