"""What this machine has: devices, drivers, versions. Everything here is best effort: a missing
framework or driver is a fact to report, never an error."""

import os
import re
import shutil
import subprocess
from importlib import metadata
from importlib.util import find_spec

from heedful.core.capability import Toolchain
from heedful.core.device import KNOWN, DeviceSpec


def version(package: str) -> str | None:
    """The installed version of a package, without importing it; None where it cannot be found."""
    try:
        return metadata.version(package) if find_spec(package) else None
    except ImportError:
        return None


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    if match is None:
        raise ValueError(f"no version number in {text!r}")
    return tuple(int(part) for part in match.group().split("."))


def toolchain() -> Toolchain:
    """The installed versions that capability rows ask for."""
    have = {name: version(name) for name in ("triton", "torch", "jax")}
    return Toolchain(**{name: version_tuple(v) if v else None for name, v in have.items()})


def devices() -> list[DeviceSpec]:
    """Every device that torch sees here, GPUs first, with live figures; the CPU always."""
    found = []
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        found = [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    return [*found, KNOWN["CPU"].live(name=_cpu_name(), units=_cores())]


def _gpu(torch, index: int) -> DeviceSpec:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    # The longest name wins: "H200" in "NVIDIA H200", "RTX 4090" in "NVIDIA GeForce RTX 4090".
    named = [s for s in KNOWN.values() if s.arch == arch and s.name in properties.name]
    same_arch = [s for s in KNOWN.values() if s.arch == arch]
    base = max(named or same_arch or [KNOWN["H100"]], key=lambda spec: len(spec.name))
    figures = {
        "name": properties.name,
        "arch": arch,
        "units": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", 0) or base.l2_bytes,
        "shared_bytes": getattr(properties, "shared_memory_per_block_optin", 0)
        or base.shared_bytes,
    }
    return base.live(**figures)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return "CPU"


def driver() -> str | None:
    """The GPU driver's version, from nvidia-smi or rocm-smi."""
    queries = (
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showdriverversion", "--csv"],
    )
    for query in queries:
        text = _output(query)
        if text:
            return f"{query[0].split('-')[0]} {text.splitlines()[-1].split(',')[-1].strip()}"
    return None


def clocks() -> dict[str, float]:
    """Clocks, power and temperature of the first NVIDIA GPU now; empty where they cannot be read.
    MHz, W and degrees Celsius."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    text = _output(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    try:
        values = [float(value) for value in (text or "").splitlines()[0].split(",")]
    except (IndexError, ValueError):
        return {}
    return dict(zip(("sm_mhz", "mem_mhz", "power_w", "temperature_c"), values, strict=True))


def commit() -> str | None:
    """The commit of the checkout this package is run from, with + if it was changed."""
    here = os.path.dirname(os.path.abspath(__file__))
    head = _output(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    if not head:
        return None
    return head + ("+" if _output(["git", "-C", here, "status", "--porcelain", "."]) else "")


def _output(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
