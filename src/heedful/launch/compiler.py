"""Kernel calls to artifacts: from memory, a loaded pack, an installed wheel of kernels, the disk
cache, or the compiler.

Each specialization is looked up or compiled once a process, by one thread. Counters tell what
happened.
"""

import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from heedful.core.base import installed, settings
from heedful.core.base.forks import new_lock
from heedful.launch.code import packs
from heedful.launch.code.artifact import Artifact
from heedful.launch.code.identity import cache_key, kernel_key
from heedful.launch.code.store import SUFFIX
from heedful.launch.spec import KernelCall

counters: Counter[str] = Counter()

_artifacts: dict[tuple, Artifact] = {}
_locks: dict[tuple, threading.Lock] = {}
_guard = new_lock()


def artifact(call: KernelCall, arch: str) -> Artifact:
    """The compiled kernel of a call for an architecture (sm_90, gfx950, ...).

    Raises RuntimeError where it is nowhere to be found and there is no Triton to compile it.
    """
    key = (arch, call.specialization)
    with _guard:
        lock = _locks.get(key) or _locks.setdefault(key, new_lock())
    with lock:
        compiled = _artifacts.get(key)
        if compiled is None:
            compiled = _artifacts[key] = _find_or_compile(call, arch)
        else:
            counters["memory_hits"] += 1
    return compiled


def _find_or_compile(call: KernelCall, arch: str) -> Artifact:
    packed = packs.find(kernel_key(call, arch))
    if packed is not None:
        counters["pack_hits"] += 1
        return packed
    if installed.compiler() is None:
        raise RuntimeError(
            f"{call.kernel.function} for {arch} is in no loaded pack and no installed wheel, and"
            " there is no Triton here to compile it: pip install triton, or add this problem to the"
            " pack (heedful prebuild)"
        )
    key = cache_key(call, arch)
    compiled, made = _disk_cache().get_or_make(key, lambda: compile_now(call, arch))
    counters["compiles" if made else "disk_hits"] += 1
    return compiled


def compile_now(call: KernelCall, arch: str) -> Artifact:
    """The kernel, compiled by the Triton of `core.base.installed.compiler`, whatever caches have.

    Raises CompileError, naming the kernel.
    """
    chosen = installed.compiler()
    if chosen is not None and chosen.apart:
        from heedful.launch.worker.pool import compile_artifact
    else:
        from heedful.launch.code.triton_compat import compile_artifact
    return compile_artifact(call, arch)


def place(call: KernelCall, arch: str) -> str:
    """Where a kernel lies that the driver does not load, and what to do, for people."""
    packed = packs.place(kernel_key(call, arch))
    if packed:
        return packed
    folder: Path | None = settings.get("cache_dir")
    file = folder and folder / "kernels" / f"{cache_key(call, arch)}{SUFFIX}"
    if file is None or not file.exists():
        return "This process compiled it: a driver as new as the assembler is wanted"
    return f"It is {file}: without that file it is compiled anew"


def _disk_cache() -> Any:
    """The DiskCache that the settings name now."""
    names = ("cache_dir", "cache_limit", "cache_read_only")
    return _opened(*(settings.get(name) for name in names))


@cache
def _opened(*named: Any) -> Any:
    # Processes whose kernels come from elsewhere do without.
    from heedful.launch.code.cache import DiskCache

    return DiskCache(*named)
