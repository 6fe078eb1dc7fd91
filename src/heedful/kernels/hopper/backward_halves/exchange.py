"""Programs of a cluster add up their parts of a product.

A warpgroup sends its part to the shared memory of the other program, whose warpgroup of the same
role adds it to its own. Both do, so both have the same sum. Each thread reads what the thread of
the same number has sent. A barrier counts the bytes that arrive.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from heedful.kernels.hopper.forward_wide.cluster import wait
from heedful.kernels.hopper.sm90.barrier import barriers
from heedful.kernels.hopper.sm90.compat import aggregate, inline_asm
from heedful.kernels.hopper.sm90.mma import ROWS

THREADS: gl.constexpr = gl.constexpr(128)
WARPS: gl.constexpr = gl.constexpr(4)
NUMBERS: gl.constexpr = gl.constexpr(ROWS.value * ROWS.value // THREADS.value)  # of a thread
# The address of a thread's first number.
_PLACE = "mov.u32 t, %tid.x; and.b32 t, t, 127; shl.b32 t, t, 4;"


@aggregate
class Inbox:
    """memory: for the other program's part of a 64 x 64 product. full: all of its bytes have
    arrived. free: the other program's memory may be written."""

    memory: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.jit
    def allocate():
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        memory = gl.allocate_shared_memory(gl.float32, [ROWS, ROWS], plain)
        return Inbox(memory, barriers(1, 1), barriers(1, WARPS))


@gluon.constexpr_function
def _sent():
    """Assembly: stores a thread's numbers in the other program's memory, four at a time."""
    memory, full, base = (f"${NUMBERS.value + i}" for i in range(3))
    lines = [
        f"{{ .reg .b32 t, a, f; {_PLACE}",
        f"add.u32 a, {memory}, t; and.b32 a, a, 0xffffff; and.b32 f, {full}, 0xffffff;",
        f"xor.b32 t, {base}, 0x1000000; or.b32 a, a, t; or.b32 f, f, t;",
    ]
    for i in range(0, NUMBERS.value, 4):
        four = ", ".join(f"${i + j}" for j in range(4))
        lines.append(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
            f" [a+{4 * THREADS.value * i}], {{{four}}}, [f];"
        )
    return "\n".join(lines) + " }"


@gluon.constexpr_function
def _added():
    """Assembly: adds the numbers that have arrived to a thread's own, four at a time."""
    memory, base = (f"${2 * NUMBERS.value + i}" for i in range(2))
    lines = [
        f"{{ .reg .b32 t, a; .reg .f32 x<4>; {_PLACE}",
        f"add.u32 a, {memory}, t; or.b32 a, a, {base};",
    ]
    for i in range(0, NUMBERS.value, 4):
        lines.append(f"ld.shared.v4.f32 {{x0, x1, x2, x3}}, [a+{4 * THREADS.value * i}];")
        lines += [f"add.f32 ${i + j}, ${i + j}, x{j};" for j in range(4)]
    return "\n".join(lines) + " }"


@gluon.constexpr_function
def _operands(*kinds):
    """Constraints of a thread's numbers, and those of other operands."""
    return ",".join(["f"] * NUMBERS.value + [*kinds, "~{memory}"])


@gluon.constexpr_function
def _in_place(*kinds):
    """Constraints: sums take the registers of a thread's own numbers."""
    ties = [str(i) for i in range(NUMBERS.value)]
    return ",".join(["=f"] * NUMBERS.value + [*ties, *kinds, "~{memory}"])


@gluon.jit
def send(inbox, x, visit, base):
    """Sends a part of a visit's product to the other program, once that has read the one before.
    base: this program's place in its cluster, times 2^24."""
    wait(inbox.free.index(0), (visit & 1) ^ 1, base)
    text: gl.constexpr = _sent()
    operands: gl.constexpr = _operands("r", "r", "r")
    inline_asm(text, operands, [x, inbox.memory, inbox.full.index(0), base])


@gluon.jit
def receive(inbox, x, visit, base):
    """The sum of this part of a visit's product and of the other program's, which may then send
    another."""
    full = inbox.full.index(0)
    inline_asm(
        "{ .reg .pred first; .reg .b32 t, a; or.b32 a, $0, $1;\n"
        "mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 first, t, 0;\n"
        "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], $2; }",
        "r,r,n,~{memory}",
        [full, base, 4 * THREADS * NUMBERS],
    )
    wait(full, visit & 1, base)
    text: gl.constexpr = _added()
    operands: gl.constexpr = _in_place("r", "r")
    x = inline_asm(text, operands, [x, inbox.memory, base], x.type)
    inline_asm(
        "{ .reg .pred first; .reg .b32 t, a; and.b32 a, $0, 0xffffff;\n"
        "xor.b32 t, $1, 0x1000000; or.b32 a, a, t;\n"
        "mov.u32 t, %laneid; setp.eq.u32 first, t, 0; bar.warp.sync 0xffffffff;\n"
        "@first mbarrier.arrive.shared::cluster.b64 _, [a]; }",
        "r,r,~{memory}",
        [inbox.free.index(0), base],
    )
    return x
