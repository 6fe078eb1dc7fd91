"""Packs: kernels compiled elsewhere, loaded with no compiler and no JIT.

A pack is a folder of artifact files and a manifest with their digests. Its kernels are found by
what they are compiled from, not by what compiled them: a pack serves a process that has another
Triton, or none. Its manifest says which Triton its kernels were planned for, see
`Variant.triton_of`.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

from heedful.core.base import settings
from heedful.core.base.forks import new_lock
from heedful.launch.code import store, wheels
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.manifest import MANIFEST, WheelFacts, manifest_text, read_manifest

# Kernel key -> the pack's folder and the digest of the kernel's file there.
_loaded: dict[str, tuple[Path, str]] = {}
# Backends with kernels in a pack, and the Triton that those of the last such pack are planned for.
_backends: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
# Those of the installed wheel too. Known calls compare it, and must not look at the wheel for that.
_with_wheel = _backends
_loading = new_lock()
_T = TypeVar("_T")


def write_pack(
    path: Path,
    entries: Mapping[str, Artifact],
    backends: Mapping[str, str],
    wheel: WheelFacts | None = None,
) -> None:
    """Writes artifacts by kernel key, with a manifest, into a folder of this user's (mode 0700).
    backends: whose kernels these are, and the version of the Triton that each is planned for.
    wheel: if a wheel is made of it. Raises OSError where that cannot be, and writes no manifest
    then."""
    from heedful.launch.code.folder import Folder

    with Folder(path, private=False, create=True) as folder:
        files = {}
        for key, artifact in entries.items():
            content = store.dump(key, artifact)
            folder.write(f"{key}{store.SUFFIX}", content)
            files[key] = hashlib.sha256(content).hexdigest()
        folder.write(MANIFEST, manifest_text(files, backends, wheel))


def load_pack(folder: str | os.PathLike) -> int:
    """Loads a pack's list of kernels into this process; returns how many there are. Raises
    ValueError if the folder is no pack, belongs to neither this user nor root, or others may write
    to it or to a folder on the way: its files are native code.
    """
    from heedful.launch.code.folder import Folder, NotTrusted  # which wheels do without

    path = Path(os.path.abspath(folder))
    try:
        with Folder(path, private=False) as opened:
            content = opened.read(MANIFEST)
    except NotTrusted as error:
        raise ValueError(f"pack {folder} is not trusted: {error}") from None
    except OSError as error:
        raise ValueError(f"pack {folder} has no readable {MANIFEST}: {error}") from None
    try:
        manifest = read_manifest(content)
    except ValueError as error:
        raise ValueError(f"pack {folder}: {error}") from None
    global _backends
    with _loading:
        _loaded.update({key: (path, digest) for key, digest in manifest.digests.items()})
        _backends = frozenset((dict(_backends) | dict(manifest.backends)).items())
        _reckon()
    return len(manifest.digests)


def _reckon() -> None:
    global _with_wheel
    wheel = wheels.current()
    wheels_own = wheel.manifest.backends if wheel is not None else {}
    _with_wheel = frozenset((dict(wheels_own) | dict(_backends)).items())


@cache
def load_default() -> None:
    """Loads the pack that the settings name and finds the installed wheel, once."""
    folder = settings.get("pack")
    if folder is not None:
        load_pack(folder)
    _reckon()


def has(key: str) -> bool:
    """Whether a loaded pack lists a kernel key, or the installed wheel has it."""
    load_default()
    return key in _loaded or _from_wheel(key, wheels.has)


def _from_wheel(key: str, ask: Callable[[str], _T]) -> _T:
    """The wheel's answer to a key. A damaged wheel ends there, and its backends with it."""
    before = wheels.current()
    try:
        return ask(key)
    finally:
        # Also where its warning is an error.
        if wheels.current() is not before:
            _reckon()


def find(key: str) -> Artifact | None:
    """The artifact of a kernel key in a loaded pack or else in the installed wheel. Raises
    ValueError if a pack's file was changed, is gone, or is not to be trusted any more."""
    load_default()
    if key not in _loaded:
        return _from_wheel(key, wheels.take)
    from heedful.launch.code.folder import Folder

    path, digest = _loaded[key]
    name = f"{key}{store.SUFFIX}"
    try:
        with Folder(path, private=False) as folder:
            content = folder.read(name)
    except OSError as error:
        raise ValueError(f"packed kernel {path / name} cannot be loaded: {error}") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"packed kernel {path / name} does not match the manifest")
    return store.parse(key, content)


def place(key: str) -> str:
    """In which pack or wheel a kernel lies, and what to do if it does not load, for people; ""
    where it is in neither."""
    name = f"{key}{store.SUFFIX}"
    if key in _loaded:
        return f"It is {_loaded[key][0] / name}: make that pack anew (heedful prebuild)"
    wheel = wheels.current()
    if wheel is None or key not in wheel.manifest.digests:
        return ""
    return f"It is {wheel.folder / name}: {wheels.remedy(wheel.name)}"


def backends(arch: str | None = None) -> frozenset[tuple[str, tuple[int, ...]]]:
    """The backends in loaded packs and in the installed wheel, and for each the version of the
    Triton that its kernels are planned for. arch: without a wheel for another architecture."""
    load_default()
    if arch is None:
        return _with_wheel
    wheel = wheels.current()
    return _backends if wheel is not None and arch != wheel.facts.arch else _with_wheel
