"""The toolchain that kernels are planned for."""

import sys

from heedful.core.base.frozen import dataclass

# The first JAX whose call of compiled kernels takes machine code and tensor maps.
JAX_ON_GPUS = (0, 11, 1)
# Later than every version.
_NEWEST = (sys.maxsize,)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The versions of Triton, torch and others here, as int tuples; None is absent. The default
    means the newest. packs: for the kernels of loaded packs, which need no Triton,
    `Variant.packed_as` and the Triton for which they are planned. validated: backends that passed
    `heedful validate` on this device, and may be chosen by default. framework: the one whose arrays
    a call has, "torch" or "jax".
    """

    triton: tuple[int, ...] | None = _NEWEST
    torch: tuple[int, ...] | None = _NEWEST
    jax: tuple[int, ...] | None = _NEWEST
    packs: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    validated: frozenset[str] = frozenset()
    framework: str = "torch"

    def tritons_of(self, packed_as: str) -> list[tuple[int, ...]]:
        """The Tritons that a variant's kernels may come from: the pack's, then the installed
        one."""
        packed = dict(self.packs).get(packed_as)
        return [version for version in (packed, self.triton) if version is not None]
