"""Packs: kernels compiled elsewhere, loaded with no compiler and no JIT.

A pack is a folder of artifact files and a manifest with their digests. Its kernels are found by
what they are compiled from, not by what compiled them: a pack made by a newer Triton serves a
process that has an older one, or none.
"""

import hashlib
import json
import os
from functools import cache
from pathlib import Path

from heedful.core import settings
from heedful.launch import store
from heedful.launch.artifact import Artifact

MANIFEST = "manifest.json"
FORMAT = 1

_loaded: dict[str, Path] = {}
_digests: dict[Path, str] = {}
_backends: set[str] = set()


def write_pack(folder: Path, entries: dict[str, Artifact], backends: set[str]) -> None:
    """Writes artifacts by kernel key, with a manifest, into a folder of this user's (mode 0700)."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = {}
    for key, artifact in entries.items():
        path = folder / f"{key}{store.SUFFIX}"
        store.write(path, artifact)
        files[key] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "target": artifact.target,
            "symbol": artifact.symbol,
            "toolchain": artifact.toolchain,
        }
    manifest = {"format": FORMAT, "backends": sorted(backends), "kernels": files}
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True))
    os.replace(temporary, folder / MANIFEST)


def load_pack(folder: str | os.PathLike) -> int:
    """Makes a pack's kernels known to this process; returns how many.

    Raises ValueError where the folder is no pack, belongs to somebody else than this user or root,
    or others may write to it: its files are native code.
    """
    folder = Path(folder)
    owners = (0, os.geteuid()) if hasattr(os, "geteuid") else ()
    why = store.why_not_trusted(folder, owners, 0o022)
    if why:
        raise ValueError(f"pack {folder} is not trusted: {why}")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"pack {folder} has no readable {MANIFEST}: {error}") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(f"pack {folder} has format {manifest.get('format')}, wanted {FORMAT}")
    for key, facts in manifest["kernels"].items():
        path = folder / f"{key}{store.SUFFIX}"
        _loaded[key], _digests[path] = path, facts["sha256"]
    _backends.update(manifest["backends"])
    return len(manifest["kernels"])


@cache
def load_default() -> None:
    """Loads the pack that the settings name, once."""
    folder = settings.get("pack")
    if folder is not None:
        load_pack(folder)


def find(key: str) -> Artifact | None:
    """The packed artifact of a kernel key. Raises ValueError if its file was changed."""
    load_default()
    path = _loaded.get(key)
    if path is None:
        return None
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != _digests[path]:
        raise ValueError(f"packed kernel {path} does not match the manifest")
    return store.parse(data)


def backends() -> frozenset[str]:
    """Backends that loaded packs hold kernels of."""
    load_default()
    return frozenset(_backends)
