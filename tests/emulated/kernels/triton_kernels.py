"""Ordinary Triton kernels that have nothing to do with attention."""

import triton
import triton.language as tl


@triton.jit
def where_am_i(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out_ptr + at, x + 10 * y + 100 * z)


@triton.jit
def softmax_rows(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < columns
    row = tl.program_id(0) * columns
    x = tl.load(x_ptr + row + at, mask=mask, other=float("-inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row + at, e / tl.sum(e, 0), mask=mask)


@triton.jit
def running_total(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.cumsum(tl.load(x_ptr + at), 0))


@triton.jit
def sorted_rows(x_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    tl.store(out_ptr + at, tl.sort(tl.load(x_ptr + at)))


@triton.jit
def histogram(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + at, mask=at < n, other=0)
    tl.atomic_add(out_ptr + value, 1, mask=at < n)


@triton.jit
def transpose(x_ptr, out_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    x = tl.load(x_ptr + rows[:, None] * COLS + cols[None, :])
    tl.store(out_ptr + cols[:, None] * ROWS + rows[None, :], tl.trans(x))


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        a = tl.load(a_ptr + m[:, None] * depth + start + k[None, :])
        b = tl.load(b_ptr + (start + k)[:, None] * N + n[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + m[:, None] * N + n[None, :], total)


@triton.jit
def divide_int64(x_ptr, out_ptr, divisor, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) // divisor)


@triton.jit
def narrow(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))
