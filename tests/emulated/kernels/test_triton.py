"""Ordinary Triton kernels run on both targets: reductions, scans, sorting, atomics, products."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from emulated.helpers.backend import TARGETS
from heedful.emulator import emulate
from heedful.emulator.command import compile_kernel
from heedful.emulator.floats import FP8, bf16_bits, bf16_values
from support.problems.grids import in_turns

PATH = str(Path(__file__).with_name("triton_kernels.py"))


@cache
def compiled(function: str, arch: str, types: tuple, constants: tuple, warps: int):
    return compile_kernel(PATH, function, arch, types, {**dict(constants), "num_warps": warps})


def run(function, arch, types, args, grid=(1,), warps=4, schedule="random:0", **constants):
    kernel = compiled(function, arch, tuple(types), tuple(constants.items()), warps)
    report = emulate(kernel, grid, args, schedule=schedule)
    assert report.clean, report.summary()


@pytest.fixture(params=TARGETS)
def arch(request):
    return request.param


def test_the_grid_has_three_dimensions_and_its_size(arch):
    out = np.full((4, 3, 5), -1, np.int32)
    run("where_am_i", arch, ["*i32"], [out], grid=(5, 3, 4))
    z, y, x = np.indices(out.shape)
    assert (out == x + 10 * y + 100 * z).all()


@pytest.mark.parametrize("warps", [1, 4])
def test_rows_are_reduced(arch, warps):
    x = np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    out = np.full_like(x, np.nan)
    run("softmax_rows", arch, ["*fp32", "*fp32", "i32"], [x, out, 300], (3,), warps, BLOCK=512)
    e = np.exp(x.astype(float) - x.max(1, keepdims=True))
    # One rounding each of difference, exponential, sum (its depth is 9) and quotient.
    assert np.abs(out / (e / e.sum(1, keepdims=True)) - 1).max() < 32 * np.finfo(np.float32).eps


@pytest.mark.parametrize("warps", [1, 4])
def test_scans_cross_lanes_and_waves(arch, warps):
    x = np.random.default_rng(0).integers(-99, 99, 1024).astype(np.int32)
    out = np.zeros_like(x)
    run("running_total", arch, ["*i32", "*i32"], [x, out], warps=warps, BLOCK=1024)
    assert (out == np.cumsum(x)).all()


def test_rows_are_sorted(arch):
    x = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    out = np.zeros_like(x)
    run("sorted_rows", arch, ["*fp32", "*fp32"], [x, out], ROWS=8, COLS=128)
    assert (out == np.sort(x, axis=1)).all()


def test_atomics_meet_in_memory(arch):
    x = np.random.default_rng(0).integers(0, 7, 1000).astype(np.int32)
    out = np.zeros(7, np.int32)
    run("histogram", arch, ["*i32", "*i32", "i32"], [x, out, 1000], (4,), BLOCK=256)
    assert (out == np.bincount(x, minlength=7)).all()


@pytest.mark.parametrize("kind", ["*fp32", "*i8", "*fp16"])
def test_transposing_through_lds(arch, kind):
    dtype = {"*fp32": np.float32, "*i8": np.int8, "*fp16": np.float16}[kind]
    x = np.arange(64 * 32).reshape(64, 32).astype(dtype)
    out = np.zeros((32, 64), dtype)
    run("transpose", arch, [kind, kind], [x, out], ROWS=64, COLS=32)
    assert (out == x.T).all()


@pytest.mark.parametrize("kind, sizes", in_turns(("*fp16", "*bf16", "*fp32"), ((32, 32), (64, 16))))
def test_products_of_small_integers_are_exact(arch, kind, sizes):
    (m, n), out_kind = sizes, "*fp32"
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (m, 128)), rng.integers(-8, 9, (128, n))
    encode = {
        "*fp16": lambda v: v.astype(np.float16),
        "*bf16": lambda v: bf16_bits(v.astype(np.float32)).astype(np.uint16),
        "*fp32": lambda v: v.astype(np.float32),
    }[kind]
    c = np.full((m, n), np.nan, np.float32)
    args = [encode(a), encode(b), c, 128]
    run("matmul", arch, [kind, kind, out_kind, "i32"], args, M=m, N=n, K=32)
    assert (c == a @ b).all()


@pytest.mark.parametrize("divisor", [7, -3, 2**33 + 1])
def test_64_bit_division(arch, divisor):
    x = np.random.default_rng(0).integers(-(2**62), 2**62, 64)
    out = np.zeros_like(x)
    run("divide_int64", arch, ["*i64", "*i64", "i64"], [x, out, divisor], warps=1, BLOCK=64)
    wanted = [abs(int(v)) // abs(divisor) * (1 if (v < 0) == (divisor < 0) else -1) for v in x]
    assert out.tolist() == wanted


def test_narrowing_to_bf16_rounds_to_nearest_even(arch):
    x = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    out = np.zeros(512, np.uint16)
    run("narrow", arch, ["*fp32", "*bf16"], [x, out], BLOCK=512)
    assert (bf16_values(out) == bf16_values(bf16_bits(x))).all()


def test_narrowing_to_fp8_gives_the_nearest_value(arch):
    x = np.random.default_rng(0).standard_normal(512).astype(np.float32) * 4
    out = np.zeros(512, np.uint8)
    kind = {"gfx942": "*fp8e4b8", "gfx950": "*fp8e4nv"}[arch]
    run("narrow", arch, ["*fp32", kind], [x, out], BLOCK=512)
    table = FP8[arch]["fp8"].astype(float)
    gaps = np.nanmin(np.abs(x[:, None] - table[None, :]), axis=1)
    assert (np.abs(table[out] - x) == gaps).all()
