"""Clocks of small kernels whose counts documents state."""

from dataclasses import replace
from functools import cache

import numpy as np

from emulated.helpers.snippets import kernel
from heedful.emulator import emulate
from heedful.emulator.clock.grid import replay
from heedful.emulator.clock.replay import Timing
from heedful.emulator.clock.trace import Recorder, Trace

# Zeros in the registers that the bodies below read, so that LDS addresses are in bounds.
LANES = "v_mov_b32_e32 v1, 0\n"


def trace(body: str, arch: str = "gfx942", waves: int = 1, lds_bytes: int = 65536) -> Trace:
    """Record one workgroup of a kernel without arguments that matter."""
    return replace(_recorded(body, arch, waves), lds_bytes=lds_bytes)


@cache
def _recorded(body: str, arch: str, waves: int) -> Trace:
    recorder = Recorder()
    text = kernel(body, arch=arch, threads=64 * waves)
    data = np.zeros(4096, np.uint32)
    report = emulate(text, (1,), [data], lds_bytes=65536, checks=(), recorder=recorder)
    return recorder.trace(report)


def timing(body: str, arch: str = "gfx942", waves: int = 1, resident: int = 1) -> Timing:
    """Replay it."""
    return replay(trace(body, arch, waves), resident)[0, 0, 0]


def clocks(body: str, arch: str = "gfx942", waves: int = 1, resident: int = 1) -> float:
    """Until its last wave ends."""
    return timing(body, arch, waves, resident).clocks


def more(body: str, arch: str = "gfx942", waves: int = 1, before: str = LANES) -> float:
    """Clocks that a body adds, once it has run before."""
    return clocks(before + body + body, arch, waves) - clocks(before + body, arch, waves)
