"""HIP's module API through ctypes. The same interface as the CUDA driver, without tensor maps.

Nobody has run this on silicon yet: rows that use it are at most `emulated`.
"""

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache

from heedful.launch.code.artifact import Artifact
from heedful.launch.driver.forked import FORKED

BUFFER_POINTER, BUFFER_SIZE, END = 1, 2, 3  # HIP_LAUNCH_PARAM_*


_forked = False


@cache
def _library() -> ctypes.PyDLL:
    if _forked:
        raise RuntimeError(FORKED)
    library = ctypes.PyDLL("libamdhip64.so")
    # Without these a handle that is a plain int would be cut to 32 bits.
    library.hipGetErrorString.argtypes = [c_int]
    library.hipGetErrorString.restype = c_char_p
    library.hipModuleLoadData.argtypes = [POINTER(c_void_p), c_char_p]
    library.hipModuleGetFunction.argtypes = [POINTER(c_void_p), c_void_p, c_char_p]
    library.hipModuleLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, *[c_void_p] * 3]
    return library


def check(code: int) -> None:
    """Raises RuntimeError with the driver's words."""
    if code:
        text = _library().hipGetErrorString(code) or b"unknown"
        raise RuntimeError(f"HIP error {code}: {text.decode()}")


def load(artifact: Artifact, device: int) -> c_void_p:
    """The function handle of an artifact on a device, which becomes the thread's current one."""
    library, module, function = _library(), c_void_p(), c_void_p()
    check(library.hipSetDevice(c_int(device)))
    check(library.hipModuleLoadData(byref(module), artifact.code))
    check(library.hipModuleGetFunction(byref(function), module, artifact.symbol.encode()))
    return function


class Slot:
    """An argument buffer and what one launch passes with it; used by one thread at a time."""

    __slots__ = ("buffer", "address", "_function", "_head", "_extra", "_size", "_tail")

    def __init__(
        self,
        artifact: Artifact,
        function: c_void_p,
        device: int,
        programmatic: bool,
        cooperative: bool,
    ):
        if programmatic or cooperative or artifact.cluster > 1:
            raise ValueError(
                "HIP has neither clusters nor programmatic or cooperative launches here: "
                f"{artifact.symbol}"
            )
        self.buffer = ctypes.create_string_buffer(artifact.parameter_bytes)
        self.address = ctypes.addressof(self.buffer)
        self._size = ctypes.c_size_t(artifact.parameter_bytes)
        size_at = ctypes.addressof(self._size)
        extra = BUFFER_POINTER, self.address, BUFFER_SIZE, size_at, END
        self._extra = (c_void_p * len(extra))(*extra)
        threads = artifact.num_warps * artifact.warp_size
        self._function, self._tail = function, (threads, 1, 1, artifact.shared_bytes)
        self._head = (function, 0, 0, 0, *self._tail)

    def set_grid(self, x: int, y: int, z: int) -> None:
        """Sets the grid in programs."""
        self._head = (self._function, x, y, z, *self._tail)

    def launch(self, stream: int) -> None:
        """Launches with the buffer's arguments on a raw stream of the current device."""
        check(_library().hipModuleLaunchKernel(*self._head, stream, None, self._extra))


def _after_fork() -> None:
    """As in the CUDA driver."""
    global _forked
    if _library.cache_info().currsize:
        _forked = True
        _library.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
