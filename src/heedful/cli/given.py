"""Input from outside, checked before a command does any work: devices and paths."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from heedful.bench.harness import machine
from heedful.cli.console import fail
from heedful.core.base.device import DeviceSpec, by_name
from heedful.core.registry.capability import Toolchain

if TYPE_CHECKING:
    import torch


def torch_device(name: str | None) -> "torch.device":
    """The device that a command works on; the first GPU, or the CPU, where none is named. Ends the
    command where there is no such device."""
    try:
        return _torch_device(name)
    except ValueError as error:
        fail(escape(str(error)))


def _torch_device(name: str | None) -> "torch.device":
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(name or ("cuda" if seen else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be cuda, cuda:1 or cpu, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= seen:
        build = "" if torch.version.cuda or torch.version.hip else ": it is torch's CPU build"
        count = f"{seen} GPU{'s' * (seen > 1)}" if seen else "no GPU"
        raise ValueError(
            f"device must be one that is there, got {name!r}; torch sees {count}{build}"
        )
    return device


def planned_device(name: str | None) -> tuple[DeviceSpec, Toolchain]:
    """The device that a problem is planned for, and the versions: a device of this machine (the
    first, or cuda, cuda:1), or a known one that is elsewhere, beside which everything is the
    newest. Raises ValueError."""
    if name is None:
        return machine.devices()[0], machine.toolchain()
    if name.partition(":")[0] != "cuda":
        return by_name(name), Toolchain()
    try:
        from heedful.torch.base.device import device_spec, toolchain
    except ImportError:
        raise ValueError(f"device {name!r} wants torch, which is not installed") from None
    device = _torch_device(name)
    return device_spec(device), toolchain(device)


def writable(path: Path | None, option: str) -> None:
    """Ends the command where nothing can be written to a file; leaves nothing behind. option: what
    the path was given by."""
    if path is None:
        return
    try:
        if path.exists():
            path.open("ab").close()
        else:
            writable_folder(path.parent)
    except OSError as error:
        fail(
            escape(
                f"{option} must be a file that can be written, got {str(path)!r}: {error.strerror}"
            )
        )


def write(path: Path, text: str) -> None:
    """Writes a file that was found to be writable, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def writable_folder(path: Path) -> None:
    """Raises OSError where a file cannot be made in a folder, which need not be there yet."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    tempfile.TemporaryFile(dir=there).close()
