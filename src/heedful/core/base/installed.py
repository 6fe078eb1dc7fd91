"""Which Triton is installed, whatever distribution brought it, and which one compiles.

PyTorch's wheels bring it under other names: `triton-rocm` and `pytorch-triton-rocm` beside ROCm
builds, `pytorch-triton` beside nightly ones. The Triton of this process is the one that `import
triton` gives. A toolchain is a folder with another one, which worker processes import.
"""

import ctypes
import importlib
import os
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from heedful.core.base import settings
from heedful.core.base.frozen import dataclass

# Distributions known to bring the module `triton`; any other is seen through the module alone.
TRITON_DISTRIBUTIONS = (
    "triton",
    "triton-rocm",
    "pytorch-triton-rocm",
    "pytorch-triton",
    "pytorch-triton-xpu",
    "triton-windows",
)

# The oldest and the newest version of each that tests were run with; `heedful doctor` names others.
TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 11), (2, 14)),
    "triton": ((3, 6), (3, 9)),
    "jax": ((0, 10), (0, 12)),
}

_SAYS = r"^__version__\s*=\s*['\"](\d[^'\"]*)['\"]\s*$"


def served_cuda() -> int | None:
    """The major version of the newest CUDA that NVIDIA's driver serves; None without a driver."""
    number = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return None if code else number.value // 1000


def triton_version() -> str | None:
    """The version of the Triton that `import triton` gives here, None where there is none.

    It is the distribution's version, which also names the build ("3.5.0+git1234"), if its numbers
    are the module's: if several distributions were installed over each other, the files are those
    of one. Otherwise it is the module's. It is imported only if its source does not say.
    """
    here = _here()
    return here and here.version


def _here() -> "Compiler | None":
    """The Triton of this process."""
    origin = _origin()
    said = origin and _module_version(Path(origin))
    return Compiler(said, Path(origin).parents[1]) if origin and said else None


def _origin() -> str | None:
    """The file of the module `triton`. Without one it is a folder that happens to have the name."""
    try:
        spec = find_spec("triton")
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


@cache
def _build(version: str, path: tuple[str, ...]) -> str:
    """The version with the name of its build, as distributions on the path have it."""
    for name in TRITON_DISTRIBUTIONS:
        for distribution in metadata.distributions(name=name, path=[*path]):
            if distribution.version and numbers(distribution.version) == numbers(version):
                return distribution.version
    return version


@cache
def _module_version(origin: Path) -> str | None:
    loaded = getattr(sys.modules.get("triton"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    said = _said(origin)
    if said:
        return said
    try:
        return str(importlib.import_module("triton").__version__)
    except (ImportError, AttributeError):
        return None


def _said(origin: Path) -> str | None:
    """The version that a module's source says."""
    try:
        said = re.search(_SAYS, origin.read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return said and said[1]


@dataclass(frozen=True, slots=True)
class Compiler:
    """A Triton that kernels are compiled by.

    said: the version that its module says. root: the folder that it is imported from. apart: by
    worker processes; else by this one.
    """

    said: str
    root: Path
    apart: bool = False

    @property
    def version(self) -> str:
        """The version with the name of the build. To plan takes numbers alone: what distributions
        say is read for keys of the cache and for people."""
        if "+" in self.said:
            return self.said
        # The distribution that brought the module lies beside it, as a rule.
        return _build(self.said, (str(self.root), *(() if self.apart else sys.path)))

    @property
    def numbers(self) -> tuple[int, ...]:
        return numbers(self.said)

    @property
    def assemblers(self) -> dict[str, Path]:
        """The assemblers of NVIDIA's assembly, by name; Triton says which, by architecture."""
        folder = self.root / "triton" / "backends" / "nvidia" / "bin"
        return {path.name: path for path in sorted(folder.glob("ptxas*"))}

    def words(self) -> str:
        """Where it is and with which assemblers, for people."""
        tools = [f"{name} {assembler_version(p)}" for name, p in self.assemblers.items()]
        where = f"in workers, of {self.root}" if self.apart else "in this process"
        return f"Triton {self.version} {where}" + "".join(f", {tool}" for tool in tools)


@cache
def assembler_version(path: Path) -> str:
    """The version that ptxas prints; "unknown" where it cannot run."""
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    match = re.search(r"\bV(\d[\d.]*)", said)
    return match[1] if match else "unknown"


def compiler() -> Compiler | None:
    """The Triton that compiles here: the one that HEEDFUL_TRITON names, else the newest toolchain
    if it is newer than this process's own, or there is none, else this process's own.

    Raises ValueError where HEEDFUL_TRITON names a folder without a Triton.
    """
    made, is_named = _toolchain()
    here = _here()
    if made is None or (here is not None and not is_named and made.numbers <= here.numbers):
        return here
    return made


@cache
def _toolchain() -> tuple[Compiler | None, bool]:
    """The toolchain that may compile here, and whether it was named: it is not to change while the
    process runs."""
    named: Path | None = settings.get("triton")
    if named is None:
        fitting = (one for one in toolchains() if one.root.name.endswith(python_tag()))
        return next(fitting, None), False
    if str(named) == settings.PROCESS:
        return None, True
    toolchain = toolchain_in(named)
    if toolchain is None:
        raise ValueError(f"HEEDFUL_TRITON={str(named)!r}: there is no Triton in that folder")
    return toolchain, True


def toolchains() -> list[Compiler]:
    """The folders that `heedful toolchain install` made, the newest first, for other Pythons,
    too."""
    base = settings.data_folder()
    folders = [toolchain_in(path) for path in base.glob("toolchains/*")] if base else []
    made = [one for one in folders if one is not None and not one.root.name.startswith(".")]
    return sorted(made, key=lambda one: (one.numbers, one.root), reverse=True)


def toolchain_in(root: Path) -> Compiler | None:
    """The Triton that a folder holds."""
    root = Path(os.path.abspath(root))
    said = _said(root / "triton" / "__init__.py")
    return Compiler(said, root, apart=True) if said else None


def python_tag() -> str:
    """The end of a toolchain's folder name: its Python and its machine."""
    import sysconfig  # which calls do not need

    return f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.11.0+cu130" -> (2, 11, 0)."""
    leading = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, leading[0].split("."))) if leading else ()
