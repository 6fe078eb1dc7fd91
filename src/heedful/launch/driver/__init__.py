"""Drivers: load machine code and launch it through the vendor's C interface. No compiler, no
framework: an argument buffer, a function handle and a raw stream. May import
`launch.code.artifact`."""

from types import ModuleType


def driver(vendor: str) -> ModuleType:
    """The driver module of a vendor: nvidia or amd."""
    if vendor == "nvidia":
        from heedful.launch.driver import cuda

        return cuda
    if vendor == "amd":
        from heedful.launch.driver import hip

        return hip
    raise ValueError(f"no driver for {vendor}")
