"""Toolchains of this user: folders in the user's data folder, each with a Triton that `pip` or `uv`
installed from the user's index, or from a file."""

import os
import secrets
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from heedful.core.base import installed, settings
from heedful.core.base.installed import Compiler
from heedful.launch.code.folder import Folder
from heedful.launch.worker.process import Worker

VERSION = "3.9.0"
# Triton 3.9.0 unpacked; other versions have less. The download lies beside it for a while.
UNPACKED_BYTES, DOWNLOAD_BYTES = 1_050_000_000, 300_000_000


def folder() -> Path:
    """Where toolchains are. Raises FileNotFoundError without a home folder."""
    base = settings.data_folder()
    if base is None:
        raise FileNotFoundError("there is no home folder: set XDG_DATA_HOME")
    return base / "toolchains"


def install(what: str | None, say: Callable[[str], None]) -> Compiler:
    """Installs a Triton, and starts a worker with it once. what: a version, or a wheel file, which
    needs no network. say: a function that prints the sizes before anything is downloaded. Raises
    ValueError if `what` is neither, OSError without room or rights, RuntimeError if the installer
    or the worker fails; then nothing is left.
    """
    wheel = Path(what or "") if (what or "").endswith(".whl") else None
    version, needed = _measured(wheel) if wheel else (what or VERSION, UNPACKED_BYTES)
    if not installed.numbers(version):
        raise ValueError(f"what to install must be a version or a wheel file, got {what!r}")
    command = _installer(is_offline=wheel is not None)
    made = folder() / f"triton-{version}-{installed.python_tag()}"
    if made.exists():
        raise FileExistsError(f"{made} is there already")
    room = needed + (0 if wheel else DOWNLOAD_BYTES)
    with Folder(made.parent, private=False, create=True):
        free = shutil.disk_usage(made.parent).free
    about = "" if wheel else "about "
    say(f"Triton {version}: {about}{needed / 1e9:.2f} GB unpacked, {free / 1e9:.1f} GB are free")
    if free < room:
        raise OSError(f"{made.parent} lacks room: {room / 1e9:.2f} GB are needed")
    # Until it is complete, it has a name that no toolchain has.
    new = made.with_name(f".{secrets.token_hex(4)}")
    new.mkdir(mode=0o700)
    try:
        wanted = str(wheel) if wheel else f"triton=={version}"
        done = subprocess.run([*command, "--target", str(new), wanted], stdin=subprocess.DEVNULL)
        unpacked = installed.toolchain_in(new)
        if done.returncode or unpacked is None:
            raise RuntimeError(f"{' '.join(command[:3])} could not install {wanted}: see above")
        Worker(unpacked).end()
        os.rename(new, made)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Compiler(unpacked.version, made, apart=True)


def _measured(wheel: Path) -> tuple[str, int]:
    """The version that a wheel's name says, and the bytes of what is in it."""
    name, version, *_ = f"{wheel.name}--".split("-")
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel} is no wheel: {error}") from None
    if "triton" not in name:
        raise ValueError(f"{wheel} must be a wheel of Triton")
    return version, size


def _installer(is_offline: bool) -> list[str]:
    """pip's command of this Python, else uv's. Raises RuntimeError without either."""
    options = ["--no-deps", "--only-binary=:all:", *["--no-index"] * is_offline]
    if find_spec("pip") is not None:
        quiet = ["--disable-pip-version-check", "--no-input"]
        return [sys.executable, "-m", "pip", "install", *quiet, *options]
    uv = shutil.which("uv")
    if uv is None:
        raise RuntimeError("neither pip nor uv is here: python -m ensurepip brings pip")
    compiled = "--compile-bytecode"  # as pip does: workers write none
    return [uv, "pip", "install", "--python", sys.executable, compiled, *options]


def named(version: str | None) -> Compiler:
    """The toolchain of a version, or of a folder's name; without one the newest. Raises ValueError
    where there is none."""
    fits = [one for one in installed.toolchains() if version in (None, one.version, one.root.name)]
    # For this Python first.
    fits.sort(key=lambda one: not one.root.name.endswith(installed.python_tag()))
    if not fits:
        there = ", ".join(one.version for one in installed.toolchains()) or "none"
        wanted = f" of Triton {version}" if version else ""
        raise ValueError(f"there is no toolchain{wanted}; installed: {there}")
    return fits[0]


def remove(version: str) -> Path:
    """Removes a toolchain. Raises ValueError where there is none, OSError where it cannot be."""
    root = named(version).root
    # Renamed first, so that a half-removed folder does not count as a toolchain.
    gone = root.with_name(f".{secrets.token_hex(4)}")
    os.rename(root, gone)
    shutil.rmtree(gone)
    return root
