"""Adds shares of dQ to float32 sums in global memory, in the order in which registers hold them.

A share (one of two, about half) of a query tile's dQ is a product of 64 rows. Each thread stores
four of its numbers at a time, 16 bytes, next to those of its neighbours. A separate warp adds the
share to global memory as one block (cp.reduce.async.bulk). So a block of dq_accum, one query tile
of one head, has this order, from the outermost: share, columns by eight, warp, row of eight,
columns by two, first or second eight rows, column. epilogue.py converts it to rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.sm90.compat import inline_asm
from heedful.kernels.hopper.sm90.promotion import store_sums


@gluon.jit
def allocate_dq(SHARES: gl.constexpr, NUMBERS: gl.constexpr):
    """Shared memory for the shares of dQ, NUMBERS numbers each."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([NUMBERS // 32, 32], gl.float32)
    return gl.allocate_shared_memory(gl.float32, [SHARES, NUMBERS // 32, 32], layout)


@gluon.jit
def put_dq(dq, place):
    """Stores a share in shared memory; bulk copies see it after the next barrier."""
    store_sums(place, dq)
    inline_asm("fence.proxy.async.shared::cta;", "~{memory}", [])


@gluon.jit
def add_block(address, place, NUMBERS: gl.constexpr):
    """Adds a share to global memory; one thread issues the bulk copy."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 first, t, 0;\n"
        "@first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;\n"
        "@first cp.async.bulk.commit_group; }",
        "l,r,n,~{memory}",
        [address, place, NUMBERS * 4],
    )


@gluon.jit
def wait_until_read():
    """Waits until all blocks have been read from shared memory."""
    inline_asm("cp.async.bulk.wait_group.read 0;", "~{memory}", [])


@gluon.jit
def wait_for_turn(turn, number):
    """Waits until `number` blocks have been added where this warp's next block goes."""
    inline_asm(
        "{ .reg .pred done; .reg .b32 t;\n"
        "AGAIN: ld.acquire.gpu.global.b32 t, [$0]; setp.ge.s32 done, t, $1;\n"
        "@!done bra.uni AGAIN;\nfence.proxy.async; }",
        "l,r,~{memory}",
        [turn, number],
    )


@gluon.jit
def end_turn(turn):
    """Waits until this thread's blocks have been added, and lets the next block be added."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 first, t, 0;\n"
        "cp.async.bulk.wait_group 0; fence.proxy.async;\n"
        "@first red.release.gpu.global.add.s32 [$0], 1; }",
        "l,~{memory}",
        [turn],
    )


@gluon.constexpr_function
def _each_four(operation, inputs):
    """Assembly: applies `operation` to four numbers at a time and this thread's column in global
    memory."""
    values, place = inputs[0], inputs[1][0]
    lines = ["{ .reg .b32 t; .reg .b64 a; mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4;"]
    lines.append(f"cvt.u64.u32 a, t; add.u64 a, a, {place};")
    for i in range(0, len(values), 4):
        four = ", ".join(values[i : i + 4])
        lines.append(f"{operation}.v4.f32 [a+{4 * 128 * i}], {{{four}}};")
    return " ".join(lines) + " }"


@gluon.constexpr_function
def _add_registers(outputs, inputs):
    return _each_four("red.relaxed.gpu.global.add", inputs)


@gluon.constexpr_function
def _store_registers(outputs, inputs):
    return _each_four("st.global", inputs)


@gluon.jit
def add_registers(address, dq):
    """Adds 64 rows to global memory, in the order in which `put_dq` stores them."""
    inline_asm(_add_registers, ("f", "l"), [dq, address])


@gluon.jit
def store_registers(address, x):
    """Stores 64 rows in global memory, in the order in which `put_dq` stores them."""
    inline_asm(_store_registers, ("f", "l"), [x, address])
