"""The record that this machine passed `heedful validate`: a small JSON file in the cache folder.

It holds for one device name and architecture, one version of heedful, one state of the kernels'
sources and one compiler, and counts for nothing else.
"""

import hashlib
import json
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

import heedful
from heedful.core.base import settings
from heedful.core.base.device import DeviceSpec
from heedful.core.base.parsed import parsed
from heedful.launch.code import identity

log = logging.getLogger("heedful.validation")


def _key(device: DeviceSpec) -> dict[str, str]:
    return {
        "device": device.name,
        "arch": device.arch,
        "heedful": heedful.__version__,
        "sources": identity.all_kernels_digest(),
        "compiler": identity.toolchain(),
    }


def path_of(device: DeviceSpec) -> Path:
    """The path of the record for such a device. Raises FileNotFoundError without a home folder."""
    cache_dir = settings.get("cache_dir")
    if cache_dir is None:
        raise FileNotFoundError("there is no home folder: set HEEDFUL_CACHE_DIR")
    name = hashlib.sha256(f"{device.name} {device.arch}".encode()).hexdigest()[:16]
    return cache_dir / "validated" / f"{device.arch}-{name}.json"


def write(device: DeviceSpec, backends: frozenset[str], date: str) -> Path:
    """Records that these backends passed on this device, in one step; returns the file.

    Raises OSError where the folder cannot be written, PermissionError where it is not this user's
    alone or HEEDFUL_CACHE_READ_ONLY is set.
    """
    path = path_of(device)
    if settings.get("cache_read_only"):
        raise PermissionError("HEEDFUL_CACHE_READ_ONLY is set")
    from heedful.launch.code.folder import Folder

    facts = {**_key(device), "backends": sorted(backends), "date": date}
    with Folder(path.parent, create=True) as folder:
        folder.write(path.name, json.dumps(facts, indent=1).encode())
    _read.cache_clear()
    return path


def remove(device: DeviceSpec) -> None:
    """Removes the record for such a device."""
    with suppress(FileNotFoundError):
        path = path_of(device)
        if not settings.get("cache_read_only"):
            from heedful.launch.code.folder import Folder

            with Folder(path.parent) as folder:
                folder.remove(path.name)
    _read.cache_clear()


def validated(device: DeviceSpec) -> frozenset[str]:
    """The backends that passed on such a device of this machine; empty without a trusted record for
    what is installed now. Read once in a process."""
    try:
        return _read(device, path_of(device))
    except FileNotFoundError:
        return frozenset()


@cache
def _read(device: DeviceSpec, path: Path) -> frozenset[str]:
    try:
        if not path.exists():
            return frozenset()
        from heedful.launch.code.folder import Folder  # which most machines do without

        with Folder(path.parent) as folder:
            content = folder.read(path.name)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        log.warning("the record of validation is not used: %s", error)
        return frozenset()
    try:
        facts = parsed(content)
        if {name: facts[name] for name in _key(device)} != _key(device):
            return frozenset()
        return frozenset(str(name) for name in facts["backends"])
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%s is not readable: %s", path, error)
        return frozenset()
