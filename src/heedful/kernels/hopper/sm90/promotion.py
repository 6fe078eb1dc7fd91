"""Keeps float32 sums of the fp8 output in shared memory. Each thread has a column of its own there.

No thread reads what another wrote, but Triton cannot know this. With its loads and stores, a
warpgroup would wait for itself three times in each promotion, and would move 8 bytes at a time
instead of 16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.softmax import scale_rows

THREADS = 128


@gluon.constexpr_function
def _moves(values, place, instruction):
    """Assembly that moves four values at a time between registers and this thread's column.
    instruction: "ld" or "st"."""
    lines = ["{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4;"]
    lines.append(f"add.u32 t, t, {place};")
    for i in range(0, len(values), 4):
        four, address = ", ".join(values[i : i + 4]), f"[t+{4 * THREADS * i}]"
        ends = f"{{{four}}}, {address}" if instruction == "ld" else f"{address}, {{{four}}}"
        lines.append(f"{instruction}.shared.v4.f32 {ends};")
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _load(outputs, inputs):
    return _moves(outputs[0], inputs[0][0], "ld")


@gluon.constexpr_function
def _store(outputs, inputs):
    return _moves(inputs[0], inputs[1][0], "st")


@gluon.constexpr_function
def _clear(outputs, _):
    return " ".join(f"mov.b32 {value}, 0;" for value in outputs[0])


@gluon.jit
def cleared(ROWS: gl.constexpr, E: gl.constexpr, layout: gl.constexpr):
    """Zeros that the compiler does not know to be zeros."""
    # ptxas: known zeros are written after the first exponentials, once for each way into the loop.
    return inline_asm(_clear, ("=f",), [], gl.distributed_type(gl.float32, [ROWS, E], layout))


@gluon.jit
def allocate_sums(CONSUMERS: gl.constexpr, E: gl.constexpr, dtype: gl.constexpr):
    """Shared memory for the output of every consumer in this dtype, as rows of float32."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows: gl.constexpr = E // 2 * dtype.primitive_bitwidth // 32
    return gl.allocate_shared_memory(gl.float32, [CONSUMERS, rows, 128], plain)


@gluon.jit
def store_sums(sums, acc_ME):
    inline_asm(_store, ("f", "r"), [acc_ME, sums])


@gluon.jit
def with_sums(sums, acc_ME, m_M, base_M):
    """The accumulator, in units of 2^-m_M, plus the sums that were stored at base_M."""
    old_ME = inline_asm(_load, ("=&f", "r"), [sums], acc_ME.type)
    factor_M = gl.where(base_M == float("-inf"), 0.0, gl.exp2(base_M - m_M))
    return acc_ME + scale_rows(old_ME, factor_M)
