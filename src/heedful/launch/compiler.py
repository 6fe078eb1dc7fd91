"""Kernel calls to artifacts: each variant is compiled once a process, by one thread.

Counters tell how often something was compiled or found.
"""

import threading
from collections import Counter

from heedful.launch.artifact import Artifact
from heedful.launch.spec import KernelCall

counters: Counter[str] = Counter()

_artifacts: dict[tuple, Artifact] = {}
_locks: dict[tuple, threading.Lock] = {}
_guard = threading.Lock()


def artifact(call: KernelCall, arch: str) -> Artifact:
    """The compiled kernel of a call for an architecture (sm_90, gfx950, ...)."""
    key = (arch, call.variant)
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        found = _artifacts.get(key)
        if found is None:
            from heedful.launch.triton_compat import compile_artifact

            counters["compiles"] += 1
            found = _artifacts[key] = compile_artifact(call, arch)
        else:
            counters["memory_hits"] += 1
    return found
