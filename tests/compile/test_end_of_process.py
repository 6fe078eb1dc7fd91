"""A process that compiled Gluon kernels ends without a word."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# What a sum along an axis lies like is asked of Triton's C++, which keeps classes for good then.
KERNEL = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def row_sums(x, y, SIZE: gl.constexpr):
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [0, 1])
    offsets = gl.arange(0, SIZE, layout=gl.SliceLayout(0, rows))
    square = gl.load(x + offsets)[None, :] + gl.full((SIZE, SIZE), 0.0, gl.float32, rows)
    gl.store(y + gl.arange(0, SIZE, layout=gl.SliceLayout(1, rows)), gl.sum(square, 1))
"""
COMPILE = """
from heedful.launch.spec import KernelCall, KernelRef, Pointer
from heedful.launch.code.triton_compat import compile_kernel

arrays = {name: Pointer(name, "float32") for name in "xy"}
ref = KernelRef("row_sums_kernel", "row_sums", "gluon")
call = KernelCall(ref, (1, 1, 1), {**arrays, "SIZE": 32}, {"num_warps": 4})
print(len(compile_kernel(call, "sm_90").asm["cubin"]))
"""


def test_a_process_that_compiled_a_gluon_kernel_says_nothing_when_it_ends(tmp_path):
    (tmp_path / "row_sums_kernel.py").write_text(KERNEL)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    assert "leaked" not in done.stderr
