"""JAX's devices and versions as the planner's facts."""

from functools import cache
from importlib import metadata

import jax

from heedful.core.base import settings
from heedful.core.base.device import KNOWN, DeviceSpec, by_name, of_arch
from heedful.core.base.installed import compiler, numbers
from heedful.core.registry.capability import Toolchain
from heedful.launch import validations
from heedful.launch.code import packs

_VENDORS = {"cuda": "nvidia", "rocm": "amd"}


def device_spec(platform: str) -> DeviceSpec:
    """The device to plan for on a platform ("cpu", "cuda", "rocm"): its first device here; without
    one, as in an export, HEEDFUL_DEVICE names it. Raises ValueError without either.
    """
    if platform == "cpu":
        return KNOWN["CPU"]
    named = settings.get("device")
    if named is not None:
        spec = by_name(named)
        if spec.vendor == _VENDORS[platform]:
            return spec
    try:
        first = jax.local_devices(backend=platform)[0]
    except RuntimeError:
        raise ValueError(
            f"HEEDFUL_DEVICE must name the device to compile for (such as H200), as there is none"
            f" of platform {platform} here, got {named!r}"
        ) from None
    return _live(platform, first.local_hardware_id)


@cache
def _live(platform: str, ordinal: int) -> DeviceSpec:
    if platform == "cuda":
        from heedful.launch.driver.cuda import figures

        live = figures(ordinal)
        return of_arch(live.pop("arch"), **live)
    from jaxlib import gpu_triton

    arch = gpu_triton.get_arch_details(ordinal).split(":")[0]
    return by_name(arch)


def toolchain(spec: DeviceSpec) -> Toolchain:
    """The versions of the Triton that compiles and of JAX, the packs loaded and the backends
    validated on this device; torch takes no part in JAX's calls."""
    triton = compiler()
    return Toolchain(
        triton=triton and triton.numbers,
        torch=None,
        jax=_jax_version(),
        packs=packs.backends(spec.arch),
        validated=validations.validated(spec),
        framework="jax",
    )


@cache
def _jax_version() -> tuple[int, ...]:
    """The lower one of jax and jaxlib, which brings the kernel calls."""
    return min(numbers(metadata.version(name)) for name in ("jax", "jaxlib"))
