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


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("there is no home folder for ~") from None


def _cache_dir() -> Path | None:
    """The folder that the XDG base directory specification gives; None where there is no home: a
    service without one, or a user id that the system has no entry for."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: what is not absolute is to be ignored.
    if os.path.isabs(base):
        return Path(base) / "heedful"
    home = os.environ.get("HOME") or _home_by_entry()
    return Path(home) / ".cache" / "heedful" if os.path.isabs(home) else None


def _home_by_entry() -> str:
    """The home folder that the system has for this user; "" if it has none."""
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""
    except ImportError:  # Windows, where only this way is known
        return os.path.expanduser("~")


def _level(text: str) -> str:
    if text.lower() not in ("debug", "info", "warning", "error"):
        raise ValueError("wanted debug, info, warning or error")
    return text.lower()


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable: how its text is read, what holds when it is unset (or a function that works it
    out), and what it does."""

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
        "largest scratch of one call in MiB; a call that needs more raises; read at the first call"
        " of a kind",
    ),
    "cache_dir": Setting(
        "HEEDFUL_CACHE_DIR",
        _folder,
        _cache_dir,
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
        "HEEDFUL_PACK", _folder, None, "folder of a pack of compiled kernels to load at start"
    ),
    "check_pages": Setting(
        "HEEDFUL_CHECK_PAGES",
        _boolean,
        False,
        "1: check page numbers and lengths of calls with a block_table, which waits for the GPU and"
        " refuses graph capture; read at the first call of a kind",
    ),
    "device": Setting(
        "HEEDFUL_DEVICE",
        str,
        None,
        "the device that JAX programs are compiled for, such as H200, where they are exported for a"
        " GPU that is not here",
    ),
    "log": Setting(
        "HEEDFUL_LOG",
        _level,
        "warning",
        "level of the `heedful` logger; info prints each dispatch decision once",
    ),
}


def is_set(name: str) -> bool:
    """Whether the environment has a say: an empty variable is as one that is not there."""
    return bool(os.environ.get(TABLE[name].variable))


def get(name: str) -> Any:
    """The value of a setting now. Raises ValueError naming the variable if its text is wrong."""
    setting = TABLE[name]
    text = os.environ.get(setting.variable)
    if not text:
        return setting.default() if callable(setting.default) else setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise ValueError(f"{setting.variable}={text!r}: {error}") from None
