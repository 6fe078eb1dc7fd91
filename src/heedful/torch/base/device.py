"""torch's devices and versions as the planner's facts."""

import sys
from dataclasses import replace
from functools import cache

import torch

from heedful.core.base.device import KNOWN, NO_GPU_ON_WINDOWS, DeviceSpec, of_arch
from heedful.core.base.installed import compiler, numbers
from heedful.core.registry.capability import Toolchain
from heedful.launch import validations
from heedful.launch.code import packs


@cache
def device_spec(device: torch.device) -> DeviceSpec:
    """A torch device's DeviceSpec, read from the hardware. Raises ValueError for kinds heedful does
    not know."""
    if device.type == "cpu":
        return replace(KNOWN["CPU"], units=torch.get_num_threads())
    if device.type != "cuda":
        raise ValueError(f"q must be on a CPU, CUDA or ROCm device, got {device}")
    if sys.platform == "win32":
        raise ValueError(f"q must be on the CPU, got {device}: {NO_GPU_ON_WINDOWS}")
    figures = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = figures.gcnArchName.split(":")[0]
        shared = figures.shared_memory_per_block
    else:
        arch = f"sm_{figures.major}{figures.minor}"
        shared = figures.shared_memory_per_block_optin
    return of_arch(
        arch,
        name=figures.name,
        units=figures.multi_processor_count,
        shared_bytes=shared,
        l2_bytes=figures.L2_cache_size,
    )


def toolchain(device: torch.device | None = None) -> Toolchain:
    """The versions of the Triton that compiles and of torch, the loaded packs, and the backends
    validated on a device (None is the first GPU or, without one, the CPU). jax does not matter for
    torch calls."""
    if device is None:
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    spec = device_spec(device)
    validated = validations.validated(spec)
    return replace(_versions(), packs=packs.backends(spec.arch), validated=validated)


@cache
def _versions() -> Toolchain:
    triton = compiler()
    return Toolchain(triton and triton.numbers, numbers(torch.__version__), None)
