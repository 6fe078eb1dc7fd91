"""Kernels that pip installed: `pip install heedful[kernels]`.

A wheel of kernels is a Python package of data alone: a pack's manifest and files. It is found as
imports find a package, without being imported, and trusted as far as they are: whoever may write
there may write heedful's own code. The files are still held against their digests, since a disk or
an installer may damage them.

A faulty wheel is no fault of the caller: one warning says so, and the process goes on without it.
"""

import hashlib
import importlib.util
import warnings
from pathlib import Path

import heedful
from heedful.core.base.forks import new_lock
from heedful.core.base.frozen import dataclass
from heedful.core.base.installed import served_cuda
from heedful.launch.code import store
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.manifest import MANIFEST, Manifest, WheelFacts, read_manifest

# The packages that may be there. The first that the driver serves is taken.
NAMES = ("heedful_kernels_sm90", "heedful_kernels_cu12_sm90")


@dataclass(frozen=True)
class Wheel:
    """An installed wheel: its distribution, its folder, what its manifest says."""

    name: str
    folder: Path
    manifest: Manifest
    facts: WheelFacts

    def read(self, key: str) -> Artifact:
        """The artifact of a kernel in it. Raises ValueError or OSError for a damaged file."""
        content = (self.folder / f"{key}{store.SUFFIX}").read_bytes()
        if hashlib.sha256(content).hexdigest() != self.manifest.digests[key]:
            raise ValueError(f"{key}{store.SUFFIX} does not match the manifest")
        return store.parse(key, content)


_lock = new_lock()
_looked = False
_current: Wheel | None = None
# Artifacts that `has` read ahead of the launch that will take them.
_read: dict[str, Artifact] = {}


def current() -> Wheel | None:
    """The installed wheel whose kernels this process may load; None if there is none."""
    global _looked, _current
    if not _looked:
        faulty: tuple[str, str] | None = None
        with _lock:
            if not _looked:
                _current, faulty = _look()
                _looked = True
        if faulty is not None:
            # Last: where warnings are errors, this one is told once, too.
            _warn(*faulty)
    return _current


def has(key: str) -> bool:
    """Whether the installed wheel has a kernel, whose file is what it was when it was made."""
    if key not in _read:
        artifact = take(key)
        if artifact is None:
            return False
        _read[key] = artifact
    return True


def take(key: str) -> Artifact | None:
    """The wheel's artifact of a kernel key. None where it has none; if a file is damaged, from then
    on for every key, and one warning says so."""
    # In one step: another thread may take the same kernel.
    ahead = _read.pop(key, None)
    if ahead is not None:
        return ahead
    wheel = current()
    if wheel is None or key not in wheel.manifest.digests:
        return None
    try:
        return wheel.read(key)
    except (OSError, ValueError) as error:
        global _current
        with _lock:
            told, _current = _current is not None, None
        if told:
            _warn(wheel.name, str(error))
        return None


def _look() -> tuple[Wheel | None, tuple[str, str] | None]:
    """The wheel; or if there are some and none can be taken, the first one's name and why."""
    reasons: dict[str, str] = {}
    for module in NAMES:
        spec = importlib.util.find_spec(module)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places:
            continue
        name = module.replace("_", "-")
        try:
            return _opened(name, Path(places[0])), None
        except (OSError, ValueError) as error:
            reasons[name] = str(error)
    return None, next(iter(reasons.items()), None)


def _opened(name: str, folder: Path) -> Wheel:
    """Raises ValueError or OSError with the reason why its kernels may not be loaded."""
    manifest = read_manifest((folder / MANIFEST).read_bytes())
    facts = manifest.wheel
    if facts is None:
        raise ValueError(f"{MANIFEST} is not that of a wheel")
    if facts.heedful != heedful.__version__:
        raise ValueError(f"it is of heedful {facts.heedful}, this is {heedful.__version__}")
    served = served_cuda()
    if served is not None and served < facts.cuda:
        raise ValueError(
            f"its kernels need a driver of CUDA {facts.cuda}, this machine's serves CUDA {served}:"
            " update the driver, or install heedful-kernels-cu12-sm90"
        )
    return Wheel(name, folder, manifest, facts)


def remedy(name: str) -> str:
    """How a wheel of kernels is made whole."""
    return f"`pip install --force-reinstall {name}=={heedful.__version__}` installs it anew"


def _warn(name: str, reason: str) -> None:
    warnings.warn(
        f"kernels of the installed {name} are not used: {reason}. Kernels are compiled instead."
        f" {remedy(name)}",
        RuntimeWarning,
        stacklevel=2,
    )
