"""Every environment variable that heedful reads, typed, in one table."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from heedful.core.base.frozen import dataclass

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


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("wanted a number of seconds > 0")
    return value


def _workers(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("wanted a number >= 1")
    return value


def _units(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("wanted a number of SMs >= 0")
    return value


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("there is no home folder for ~") from None


def _base(variable: str, *usual: str) -> Path | None:
    """The folder that the XDG base directory specification gives; None where there is no home: a
    service without one, or a user id that the system has no entry for."""
    base = os.environ.get(variable, "")
    # The specification: a path that is not absolute is ignored.
    if os.path.isabs(base):
        return Path(base) / "heedful"
    home = os.environ.get("HOME") or _home_by_entry()
    return Path(home, *usual, "heedful") if os.path.isabs(home) else None


def _cache_dir() -> Path | None:
    return _base("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path | None:
    """Where toolchains are installed; None where there is no home."""
    return _base("XDG_DATA_HOME", ".local", "share")


def _home_by_entry() -> str:
    """The home folder in the system's entry for this user; "" without one."""
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


# Whether bits of a result may depend on how a call is made, see core/call/numerics.py.
NUMERICS = ("fast", "invariant")


def _numerics(text: str) -> str:
    if text not in NUMERICS:
        raise ValueError(f"wanted one of {', '.join(NUMERICS)}")
    return text


# HEEDFUL_TRITON where this process's own Triton is to compile.
PROCESS = "process"

# When a setting is read.
START = "once, when heedful is first used"
KIND = "at the first call of a kind; where JAX traces a program"
TRACE = "where JAX traces a program"
USE = "each time that it is needed"


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable: how its text is read, what holds when it is unset (or a function that works it
    out), when it is read, and what it does."""

    parse: Callable[[str], Any]
    default: Any
    read: str
    help: str


TABLE = {
    "backend": Setting(
        str,
        None,
        KIND,
        "backend to use for every call that names none; such a call raises where it cannot",
    ),
    "numerics": Setting(
        _numerics,
        "fast",
        KIND,
        "what calls take that name no numerics: fast, or invariant for bits that do not depend on"
        " how a call is made",
    ),
    "workspace_limit": Setting(
        _size, None, KIND, "largest scratch of one call in MiB; a call that needs more raises"
    ),
    "sm_margin": Setting(
        _units,
        0,
        KIND,
        "SMs that kernels of a fixed number of programs leave to others, such as NCCL's; rounded up"
        " to an even number",
    ),
    "cache_dir": Setting(
        _folder, _cache_dir, USE, "where compiled kernels are kept between processes"
    ),
    "cache_limit": Setting(
        _size,
        2048 * 1024 * 1024,
        USE,
        "size in MiB past which the least recently used kernels leave the cache",
    ),
    "cache_read_only": Setting(_boolean, False, USE, "1: never write to the cache"),
    "pack": Setting(_folder, None, START, "folder of a pack of compiled kernels to load at start"),
    "triton": Setting(
        _folder,
        None,
        START,
        "folder of the Triton that worker processes compile with, or `process` for this process's;"
        " else a toolchain that is newer than this process's Triton",
    ),
    "workers": Setting(
        _workers,
        lambda: max(1, min(8, (os.cpu_count() or 1) // 2)),
        USE,
        "how many kernels worker processes of this user compile at once on this machine (half the"
        " cores, 8 at most)",
    ),
    "compile_seconds": Setting(
        _seconds, 600.0, USE, "how long a worker process may compile one kernel before it is ended"
    ),
    "check_pages": Setting(
        _boolean,
        False,
        KIND,
        "1: check page numbers and lengths of calls with a block_table, and lists of a block_mask,"
        " which waits for the GPU and refuses graph capture",
    ),
    "device": Setting(
        str,
        None,
        TRACE,
        "the device that JAX programs are compiled for, such as H200, where they are exported for a"
        " GPU that is not here",
    ),
    "log": Setting(
        _level,
        "warning",
        START,
        "level of the `heedful` logger; info prints each dispatch decision once",
    ),
}


def variable(name: str) -> str:
    """The environment variable of a setting; those of sizes, which are in MiB, end with _MB."""
    return f"HEEDFUL_{name.upper()}" + "_MB" * (TABLE[name].parse is _size)


def is_set(name: str) -> bool:
    """Whether the environment sets it: an empty variable counts as unset."""
    return bool(os.environ.get(variable(name)))


def get(name: str) -> Any:
    """The value of a setting now. Raises ValueError naming the variable if its text is wrong."""
    setting = TABLE[name]
    text = os.environ.get(variable(name))
    if not text:
        return setting.default() if callable(setting.default) else setting.default
    try:
        return setting.parse(text)
    except ValueError as error:
        raise ValueError(f"{variable(name)}={text!r}: {error}") from None


def get_all(*names: str) -> tuple:
    """The values of settings now. Raises as `get`."""
    return tuple(map(get, names))


class _Clears(Protocol):
    def clear(self) -> None: ...


Cache = TypeVar("Cache", bound=_Clears)
# Functions that empty caches of what depends on settings that are read once for each kind of call.
_forgetting: list[Callable[[], None]] = []


def forgotten(cache: Cache) -> Cache:
    """The cache. `configure` clears it, since its entries depend on settings. A forked child clears
    it, too, since it may not do all that its parent may."""
    _forgetting.append(cache.clear)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=cache.clear)
    return cache


def configure(**settings: Any) -> None:
    """Changes settings of this process, and of those that it starts: the environment variables
    HEEDFUL_BACKEND, HEEDFUL_CHECK_PAGES, ... by their names without HEEDFUL_, in lower case.
    heedful.configure(backend="portable", workspace_limit_mb=512)

    Calls of known kinds are planned anew; programs that JAX has traced, and captured graphs, stay
    as they are. An environment variable that is changed otherwise is first read by calls of kinds
    that were not seen yet.

    Args:
        settings: a value for each that is to change; None unsets it.

    Raises:
        TypeError: a setting that there is not.
        ValueError: a value that it cannot have, or a setting that is read once. Nothing is changed
            then.
    """
    names = {variable(name).removeprefix("HEEDFUL_").lower(): name for name in TABLE}
    changes = {}
    for name, value in settings.items():
        if name not in names:
            raise TypeError(f"{name} must be one of {', '.join(names)}")
        setting, key = TABLE[names[name]], variable(names[name])
        if setting.read == START:
            raise ValueError(f"{name} must be set as {key} before heedful is first used")
        changes[key] = text = "" if value is None else str(value)
        try:
            setting.parse(text) if text else None
            if "\0" in text:
                raise ValueError("no variable holds a null byte")
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from None
    for key, text in changes.items():
        os.environ.pop(key, None)
        if text:
            os.environ[key] = text
    for forget in _forgetting:
        forget()
