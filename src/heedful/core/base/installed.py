"""Which Triton is installed, whatever distribution brought it.

PyTorch's wheels bring it under names of their own: `triton-rocm` and `pytorch-triton-rocm` beside
ROCm builds, `pytorch-triton` beside nightly ones. What counts is what `import triton` gives.
"""

import importlib
import re
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

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
    "torch": ((2, 11), (2, 15)),
    "triton": ((3, 6), (3, 9)),
    "jax": ((0, 10), (0, 12)),
}

_SAYS = r"^__version__\s*=\s*['\"](\d[^'\"]*)['\"]\s*$"


def triton_version() -> str | None:
    """The version of the Triton that `import triton` gives here, None where there is none.

    That of the distribution, which also tells builds apart ("3.5.0+git1234"), if its numbers are
    those of the module: of several distributions that were installed over one another, one has the
    files. Otherwise the module's. It is imported only if its source does not say.
    """
    try:
        spec = find_spec("triton")
    except (ImportError, ValueError):
        return None
    # Without a file of its own it is a folder that happens to have the name.
    if spec is None or spec.origin is None:
        return None
    return _version_of(spec.origin, tuple(sys.path))


@cache
def _version_of(origin: str, _path: tuple[str, ...]) -> str | None:
    own = _module_version(Path(origin))
    if own is None:
        return None
    for name in TRITON_DISTRIBUTIONS:
        try:
            given = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if given and numbers(given) == numbers(own):
            return given
    return own


def _module_version(origin: Path) -> str | None:
    loaded = getattr(sys.modules.get("triton"), "__version__", None)
    if loaded is not None:
        return str(loaded)
    try:
        said = re.search(_SAYS, origin.read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        said = None
    if said:
        return said[1]
    try:
        return str(importlib.import_module("triton").__version__)
    except (ImportError, AttributeError):
        return None


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.11.0+cu130" -> (2, 11, 0)."""
    leading = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, leading[0].split("."))) if leading else ()
