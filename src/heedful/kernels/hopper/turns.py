"""Turns between consumers: one queues its matrix products while another is in its softmax.

Named barriers from 8 on, one a consumer: it waits at its own, and the one before it arrives there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def take_turn(shape, WORKER: gl.constexpr):
    """Waits until the consumer before this one has queued its matrix products."""
    if shape.ORDERED:
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.u32 $0, 0;",
            "=r,r",
            [gl.to_tensor(8 + WORKER)],
            gl.int32,
            False,
            1,
        )


@gluon.jit
def pass_turn(shape, WORKER: gl.constexpr):
    """Lets the next consumer queue its matrix products."""
    if shape.ORDERED:
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.u32 $0, 0;",
            "=r,r",
            [gl.to_tensor(8 + (WORKER + 1) % shape.CONSUMERS)],
            gl.int32,
            False,
            1,
        )


@gluon.jit
def skip(k, v, at_k, at_v, count, shape, WORKER: gl.constexpr):
    """Passes over tiles that other consumers of this program need and this one does not.

    No product holds the warps together here, so that releasing must: a warp that lagged behind
    would miss a phase of the barrier it waits for.
    """
    for _ in range(count):
        take_turn(shape, WORKER)
        pass_turn(shape, WORKER)
        k.wait(at_k)
        k.release(at_k)
        at_k = at_k.next()
        v.wait(at_v)
        v.release(at_v)
        at_v = at_v.next()
    return at_k, at_v


@gluon.jit
def skip_slots(slots, at, count, shape, WORKER: gl.constexpr):
    """As `skip`, of keys and values side by side."""
    for _ in range(count):
        take_turn(shape, WORKER)
        pass_turn(shape, WORKER)
        at = slots.skip(at)
    return at
