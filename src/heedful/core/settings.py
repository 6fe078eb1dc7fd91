"""Every environment variable that heedful reads, typed, in one table."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def _boolean(text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise ValueError("wanted 1 or 0")
    return text.lower() in _TRUE


def _size(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("wanted a number of MiB >= 0")
    return value * 1024 * 1024


def _level(text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError("wanted debug, info, warning or error")
    return text.lower()


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable: how its text is read, what holds when it is unset, and what it does."""

    variable: str
    parse: Callable[[str], Any]
    default: Any
    help: str


TABLE = {
    "backend": Setting(
        "HEEDFUL_BACKEND",
        str,
        None,
        "backend to use for every call that names none; such a call raises where it cannot",
    ),
    "workspace_limit": Setting(
        "HEEDFUL_WORKSPACE_LIMIT_MB",
        _size,
        None,
        "largest scratch of one call in MiB; a call that needs more raises",
    ),
    "cache_dir": Setting(
        "HEEDFUL_CACHE_DIR",
        Path,
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heedful",
        "where compiled kernels are kept between processes",
    ),
    "cache_limit": Setting(
        "HEEDFUL_CACHE_LIMIT_MB",
        _size,
        2048 * 1024 * 1024,
        "size in MiB past which the least recently used kernels leave the cache",
    ),
    "cache_read_only": Setting(
        "HEEDFUL_CACHE_READ_ONLY", _boolean, False, "1: never write to the cache"
    ),
    "pack": Setting(
        "HEEDFUL_PACK", Path, None, "folder of a pack of compiled kernels to load at start"
    ),
    "log": Setting(
        "HEEDFUL_LOG",
        _level,
        "warning",
        "level of the `heedful` logger; info prints each dispatch decision once",
    ),
}


def get(name: str) -> Any:
    """The value of a setting now. Raises ValueError naming the variable if its text is wrong."""
    setting = TABLE[name]
    text = os.environ.get(setting.variable)
    if text is None:
        return setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise ValueError(f"{setting.variable}={text!r}: {error}") from None
