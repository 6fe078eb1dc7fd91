"""Packs: kernels compiled elsewhere, loaded with no compiler and no JIT.

A pack is a folder of artifact files and a manifest with their digests. Its kernels are found by
what they are compiled from, not by what compiled them: a pack serves a process that has another
Triton, or none. Its manifest says which Triton its kernels were planned for, see
`Variant.triton_of`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from heedful.core.base import settings
from heedful.core.base.forks import new_lock
from heedful.core.base.installed import numbers
from heedful.core.base.parsed import parsed
from heedful.launch.code import store
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.folder import Folder, NotTrusted

MANIFEST = "manifest.json"
FORMAT = 3

# Kernel key -> the pack's folder and the digest of the kernel's file there.
_loaded: dict[str, tuple[Path, str]] = {}
# Backends with kernels in a pack, and the Triton that those of the last such pack are planned for.
_backends: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
_loading = new_lock()


def write_pack(path: Path, entries: dict[str, Artifact], backends: Mapping[str, str]) -> None:
    """Writes artifacts by kernel key, with a manifest, into a folder of this user's (mode 0700).
    backends: whose kernels these are, and the version of the Triton that each is planned for.
    Raises OSError where that cannot be, and writes no manifest then."""
    with Folder(path, private=False, create=True) as folder:
        files = {}
        for key, artifact in entries.items():
            content = store.dump(key, artifact)
            folder.write(f"{key}{store.SUFFIX}", content)
            files[key] = {
                "sha256": hashlib.sha256(content).hexdigest(),
                "target": artifact.target,
                "symbol": artifact.symbol,
                "toolchain": artifact.toolchain,
            }
        manifest = {"format": FORMAT, "backends": dict(backends), "kernels": files}
        folder.write(MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())


def load_pack(folder: str | os.PathLike) -> int:
    """Loads a pack's list of kernels into this process; returns how many there are. Raises
    ValueError if the folder is no pack, belongs to neither this user nor root, or others may write
    to it or to a folder on the way: its files are native code.
    """
    path = Path(os.path.abspath(folder))
    try:
        with Folder(path, private=False) as opened:
            content = opened.read(MANIFEST)
    except NotTrusted as error:
        raise ValueError(f"pack {folder} is not trusted: {error}") from None
    except OSError as error:
        raise ValueError(f"pack {folder} has no readable {MANIFEST}: {error}") from None
    try:
        digests, made = read_manifest(content)
    except ValueError as error:
        raise ValueError(f"pack {folder}: {MANIFEST} {error}") from None
    global _backends
    with _loading:
        _loaded.update({key: (path, digest) for key, digest in digests.items()})
        _backends = frozenset((dict(_backends) | made).items())
    return len(digests)


def read_manifest(content: bytes) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """A manifest's digests by kernel key, and its backends with the Triton that they are planned
    for. Raises ValueError saying what is wrong with it."""
    try:
        manifest = parsed(content)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        version = manifest.get("format") if isinstance(manifest, dict) else None
        raise ValueError(
            f"has format {version}, wanted {FORMAT}: prebuild it with this version of heedful"
        )
    try:
        digests = {key: str(facts["sha256"]) for key, facts in manifest["kernels"].items()}
        made = {str(name): numbers(triton) for name, triton in manifest["backends"].items()}
        return digests, made
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"lacks what a pack's has: {error!r}") from None


@cache
def load_default() -> None:
    """Loads the pack that the settings name, once."""
    folder = settings.get("pack")
    if folder is not None:
        load_pack(folder)


def has(key: str) -> bool:
    """Whether a loaded pack lists a kernel key."""
    load_default()
    return key in _loaded


def find(key: str) -> Artifact | None:
    """The packed artifact of a kernel key. Raises ValueError if its file was changed, is gone, or
    is not to be trusted any more."""
    load_default()
    if key not in _loaded:
        return None
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


def backends() -> frozenset[tuple[str, tuple[int, ...]]]:
    """The backends in loaded packs, and for each the version of the Triton that its kernels are
    planned for."""
    load_default()
    return _backends
