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
def skip(slots, at, count, shape, WORKER: gl.constexpr):
    """Passes over tiles that other consumers of this program need and this one does not."""
    for _ in range(count):
        take_turn(shape, WORKER)
        pass_turn(shape, WORKER)
        at = slots.skip(at)
    return at


@gluon.jit
def skip_all(slots, at, count, shape, WORKER: gl.constexpr):
    """Passes over all tiles that this program works on: there may be none."""
    at = skip(slots, at, count, shape, WORKER)
    if count > 0:
        at = slots.skip_last_values(at)
    return at
