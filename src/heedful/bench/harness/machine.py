"""The parts of this machine: devices, drivers, versions. Everything here is best effort: a missing
framework or driver is a fact to report, never an error."""

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec

from heedful.core.base import installed
from heedful.core.base.device import KNOWN, DeviceSpec
from heedful.core.base.installed import triton_version
from heedful.core.registry.capability import Toolchain


def version(package: str, module: str | None = None) -> str | None:
    """The installed version of a package, without importing it; None where it cannot be found.
    module: what it is imported as, if not by its own name."""
    if package == "triton":
        return triton_version()
    try:
        return metadata.version(package) if find_spec(module or package) else None
    except ImportError:
        return None


def compiler() -> str | None:
    """The Triton that compiles here, where, and with which assemblers. Raises ValueError as
    `installed.compiler` does."""
    triton = installed.compiler()
    return triton and triton.words()


def toolchain() -> Toolchain:
    """The installed versions that capability rows ask for."""
    try:
        from heedful.torch.base.device import toolchain as beside_torch
    except ImportError:
        return Toolchain(None, None, None)
    return beside_torch()


def devices() -> list[DeviceSpec]:
    """Every device that torch sees here, GPUs first, with live figures; the CPU always."""
    try:
        import torch

        from heedful.torch.base.device import device_spec
    except ImportError:
        return [KNOWN["CPU"].live(name=cpu_name())]
    has_gpus = torch.cuda.is_available() and sys.platform != "win32"
    gpus = range(torch.cuda.device_count() if has_gpus else 0)
    specs = [device_spec(torch.device("cuda", index)) for index in gpus]
    return [*specs, device_spec(torch.device("cpu")).live(name=cpu_name())]


def cpu_name() -> str:
    """The machine's name for its CPU."""
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return "CPU"


@cache
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


@cache
def commit() -> str | None:
    """The commit of the checkout this package is run from, with + if it was changed. None of a
    package that is installed, though its environment lie in a checkout of something else."""
    here, name = os.path.split(os.path.abspath(__file__))
    if not _output(["git", "-C", here, "ls-files", name]):
        return None
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
