"""Waits and arrivals at barriers without the warpgroup-wide barriers that Triton adds to both.

A warpgroup's products finish together, so one thread may release the memory that they read. Triton
cannot know this. It synchronises all four warps, and the fastest of them loses its lead.

Named barriers here are shared by two warpgroups, 256 threads. Their numbers begin at FIRST_NAMED:
Triton uses those below.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from heedful.kernels.hopper.sm90.compat import HAS_INLINE_ASM, inline_asm

FIRST_NAMED: gl.constexpr = gl.constexpr(8)


@gluon.jit
def _named(DOES: gl.constexpr, barrier):
    """Runs the PTX instruction DOES at a named barrier of two warpgroups."""
    WORDS: gl.constexpr = f"{DOES} $1, 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(WORDS, "=r,r", [gl.to_tensor(barrier)], gl.int32, False, 1)


@gluon.jit
def sync_named(barrier):
    """Waits at a named barrier until the other warpgroup has arrived."""
    _named("bar.sync", barrier)


@gluon.jit
def arrive_named(barrier):
    """Arrives at a named barrier without waiting."""
    _named("bar.arrive", barrier)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT initialised mbarriers in shared memory; ARRIVALS arrivals complete a phase."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(made.index(index), count=ARRIVALS)
    return made


@gluon.jit
def wait(bar, parity, pred=True):
    """Waits until `bar` has completed the phase of this parity, if `pred`."""
    if HAS_INLINE_ASM:
        inline_asm(
            "{ .reg .pred done, ask; setp.ne.s32 ask, $2, 0; @!ask bra.uni PASS;\n"
            "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
            "@!done bra.uni AGAIN;\nPASS: }",
            "r,r,r,~{memory}",
            [bar, parity, gl.to_tensor(pred).to(gl.int32)],
        )
    else:
        mbarrier.wait(bar, parity, pred=pred)


@gluon.jit
def arrive_after_mma(bar):
    """One arrival of a warpgroup. The warpgroup has waited for the products that read the memory
    which `bar` frees, so that a single thread can arrive for all."""
    if HAS_INLINE_ASM:
        inline_asm(
            "{ .reg .pred first; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127;\n"
            "setp.eq.u32 first, t, 0; @first mbarrier.arrive.shared::cta.b64 _, [$0]; }",
            "r,~{memory}",
            [bar],
        )
    else:
        mbarrier.arrive(bar, count=1)


@gluon.jit
def arrive_each_warp(bar):
    """One arrival of each warp, after the work of its threads: four arrivals of a warpgroup."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 first, t, 0;\n"
        "bar.warp.sync 0xffffffff;\n"
        "@first mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        [bar],
    )


@gluon.jit
def arrive_lane(bar):
    """One arrival of a warp."""
    inline_asm(
        "{ .reg .pred first; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 first, t, 0;\n"
        "@first mbarrier.arrive.shared::cta.b64 _, [$0]; }",
        "r,~{memory}",
        [bar],
    )
